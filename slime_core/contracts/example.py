"""Examples: inputs that the contract kit tests a plugin with, and expected results computed by hand.

A driver returns them from `examples` as plain numbers: a wrong factor that code and test share would cancel, a number
computed by hand does not. An example with expected results is called an anchor; losses, advantages, KL estimators and
corrections need at least one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from slime_core.types.weights import Bucket

Numbers: TypeAlias = Sequence[float]
"""One number per response token of a sample, masked ones included."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Options to test a plugin with; the kit checks every property for the options of each example."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plugin, by key; others have their defaults."""


@dataclass(frozen=True, kw_only=True)
class ExampleSample:
    """One sample of an example: a prompt of one token and as many response tokens as `mask` has entries.

    Unused per-token numbers can stay None; log-probs, entropy and KL in nats; `old_*`: before this rollout's training.
    """

    mask: Sequence[int]
    """1 = trained token, 0 = masked."""
    reward: float = math.nan
    """After shaping; NaN: no reward."""
    group: int = 0
    """Group index: samples of one prompt, which are compared with each other."""
    rollout: int | None = None
    """Rollout id, shared by the samples of one trajectory; None: a trajectory of its own."""
    truncated: bool = False
    """The response reached the token limit."""
    log_probs: Numbers | None = None
    """Under the weights being trained."""
    values: Numbers | None = None
    """Values of a critic: for a loss under the weights being trained, for an advantage before this rollout's training."""
    entropy: Numbers | None = None
    advantages: Numbers | None = None
    returns: Numbers | None = None
    """Value targets of a critic."""
    old_log_probs: Numbers | None = None
    old_values: Numbers | None = None
    ref_log_probs: Numbers | None = None
    rollout_log_probs: Numbers | None = None
    teacher_log_probs: Numbers | None = None
    kl_penalty: Numbers | None = None
    """kl_coef x k(old, ref)."""


@dataclass(frozen=True, kw_only=True)
class LossExample(Example):
    """Expected values at masked tokens are ignored, but the gradient there must be 0."""

    samples: Sequence[ExampleSample]
    values: Sequence[Numbers]
    """Loss of each token, one row per sample."""
    gradient: Sequence[Numbers]
    """Derivative of the sum of `values` over the trained tokens by each token's log-prob (critic: by its value)."""


@dataclass(frozen=True, kw_only=True)
class AdvantageExample(Example):
    """Expected numbers at masked tokens are ignored."""

    samples: Sequence[ExampleSample]
    advantages: Sequence[Numbers]
    """Expected, one row per sample."""
    returns: Sequence[Numbers] | None = None
    """Expected, one row per sample; None: not checked."""


@dataclass(frozen=True, kw_only=True)
class ShapingExample(Example):
    samples: Sequence[ExampleSample]
    max_response_len: int
    rewards: Sequence[float]
    """Expected after shaping, one per sample."""


@dataclass(frozen=True, kw_only=True)
class CorrectionExample(Example):
    """The samples are those of one optimizer step; expected weights at masked tokens are ignored."""

    samples: Sequence[ExampleSample]
    weights: Sequence[Numbers]
    """Expected, one row per sample; 0 where the correction masks the token."""


@dataclass(frozen=True, kw_only=True)
class KlExample(Example):
    """One entry per token."""

    log_probs: Numbers
    ref_log_probs: Numbers
    ratio: Numbers | None = None
    """exp(log_probs - old_log_probs); None: not passed."""
    values: Numbers
    """Expected estimates, in nats."""
    gradient: Numbers
    """Derivative of the sum of `values` by `log_probs`, with `ratio` held fixed."""


@dataclass(frozen=True, kw_only=True)
class RewardExample(Example):
    """One prompt and responses to it."""

    prompt: str = ""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    responses: Sequence[str]
    rewards: Sequence[float] | None = None
    """Expected, one per response (with named numbers: the one that `reward_key` names); None: not checked."""


@dataclass(frozen=True, kw_only=True)
class FilterExample(Example):
    """For a filter of groups or of the buffer that reads the metadata of prompts."""

    metadata: Sequence[Mapping[str, Any]] = ({},)
    """Metadata of the prompts in order, repeated from the start when it ends."""


@dataclass(frozen=True, kw_only=True)
class SourceExample(Example):
    """`options` name data of at least three rows with different prompts. `input_key`, `label_key`: their columns."""

    input_key: str = "input"
    label_key: str | None = None
    seeded: bool = False
    """True: another seed must give another order."""
    epochs: bool = True
    """True: all other rows are drawn between two draws of a row. False: rows are drawn by weight or at random."""
    other_options: Mapping[str, Any] | None = None
    """Options that name other data, whose fingerprint must differ; None: not checked."""


@dataclass(frozen=True, kw_only=True)
class CollectorExample(Example):
    """For a collector that reads its steps from the `options`: how many groups, samples and steps they have."""

    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 2
    num_steps: int = 2


@dataclass(frozen=True, kw_only=True)
class TransportExample(Example):
    """For a transport with senders: `mock_server` runs an engine's server to which they send.

    In `with mock_server(receive) as url:` it serves at `url` and calls `receive` with whole buckets, the last one marked.
    If `receive` raises EngineError, the engine refuses the bucket, and the server must report that to the senders."""

    mock_server: Callable[[Callable[[Bucket], None]], AbstractContextManager[str]]
    endpoint: Callable[..., Any] | None = None
    """Makes the endpoint of a server from `index`, `url` and `incarnation`; None: a plain `EngineEndpoint`."""


@dataclass(frozen=True, kw_only=True)
class BackendExample(Example):
    """Training with `world_size` ranks (at most two on a small machine) must give the result of one rank."""

    world_size: int = 1
