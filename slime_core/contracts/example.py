"""Examples: what the contract kit tries a plugin on, and answers that were worked out by hand.

A driver gives them with `examples`, as plain numbers: a factor that the code and its test share would cancel, a number
from a sheet of paper does not. An example that carries such answers is called an anchor; losses, advantages, KL
estimators and corrections need at least one.
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
"""One for each response token of a sample, masked ones included."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Options to try a plugin with; the kit proves every property for each set of options that an example names."""

    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExampleSample:
    """One sample of an example: a prompt of one token and as many response tokens as `mask` has entries.

    Of the per-token numbers only those need be given that the part reads.
    """

    mask: Sequence[int]
    """1 = trained."""
    reward: float = math.nan
    group: int = 0
    """Samples of one prompt, which are compared with each other."""
    rollout: int | None = None
    """Samples of one trajectory share it; None: a trajectory of its own."""
    truncated: bool = False
    log_probs: Numbers | None = None
    """Under the weights being trained."""
    values: Numbers | None = None
    """Of a critic: for a loss under the weights being trained, for an advantage before this rollout's training."""
    entropy: Numbers | None = None
    advantages: Numbers | None = None
    returns: Numbers | None = None
    old_log_probs: Numbers | None = None
    old_values: Numbers | None = None
    ref_log_probs: Numbers | None = None
    rollout_log_probs: Numbers | None = None
    teacher_log_probs: Numbers | None = None
    kl_penalty: Numbers | None = None
    """kl_coef x k(old, ref)."""


@dataclass(frozen=True, kw_only=True)
class LossExample(Example):
    """Answers at masked tokens are not looked at, but there the gradient must be 0."""

    samples: Sequence[ExampleSample]
    values: Sequence[Numbers]
    """The loss of each token, a row for each sample."""
    gradient: Sequence[Numbers]
    """Of the sum of these values over the trained tokens, by each token's log-prob (of a critic: by its value)."""


@dataclass(frozen=True, kw_only=True)
class AdvantageExample(Example):
    """Answers at masked tokens are not looked at."""

    samples: Sequence[ExampleSample]
    advantages: Sequence[Numbers]
    returns: Sequence[Numbers] | None = None
    """None: not looked at."""


@dataclass(frozen=True, kw_only=True)
class ShapingExample(Example):
    samples: Sequence[ExampleSample]
    max_response_len: int
    rewards: Sequence[float]
    """After shaping, one for each sample."""


@dataclass(frozen=True, kw_only=True)
class CorrectionExample(Example):
    """The samples are those of one optimiser step; answers at masked tokens are not looked at."""

    samples: Sequence[ExampleSample]
    weights: Sequence[Numbers]
    """0 where the correction takes the token out."""


@dataclass(frozen=True, kw_only=True)
class KlExample(Example):
    """One entry for each token."""

    log_probs: Numbers
    ref_log_probs: Numbers
    ratio: Numbers | None = None
    values: Numbers
    """Nats."""
    gradient: Numbers
    """Of the sum of the values, by `log_probs`, with `ratio` held fixed."""


@dataclass(frozen=True, kw_only=True)
class RewardExample(Example):
    """One prompt and answers to it."""

    prompt: str = ""
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    responses: Sequence[str]
    rewards: Sequence[float] | None = None
    """What they must earn (of several named numbers: the one that `reward_key` names); None: not looked at."""


@dataclass(frozen=True, kw_only=True)
class FilterExample(Example):
    """For a filter of groups or of the buffer that reads the metadata of prompts."""

    metadata: Sequence[Mapping[str, Any]] = ({},)
    """Of one prompt after the other, from the start again when they end."""


@dataclass(frozen=True, kw_only=True)
class SourceExample(Example):
    """`options` name data of at least three rows, whose prompts differ, perhaps in the folder given to `examples`."""

    input_key: str = "input"
    label_key: str | None = None
    seeded: bool = False
    """Under these options another seed must give another order."""
    epochs: bool = True
    """Between two draws of a row all others are drawn; False: rows are drawn by weight or at random."""
    other_options: Mapping[str, Any] | None = None
    """Options that name other data: the fingerprint must differ."""


@dataclass(frozen=True, kw_only=True)
class CollectorExample(Example):
    """For a collector whose steps come from the `options`: what they hold."""

    rollout_batch_size: int = 2
    n_samples_per_prompt: int = 2
    num_steps: int = 2


@dataclass(frozen=True, kw_only=True)
class TransportExample(Example):
    """For a transport with senders: `partner` plays a server at which they deliver.

    `with partner(receive) as url:` it answers there. It hands over whole buckets, the last one marked; EngineError from
    `receive` is a bucket that the engine refuses, which the senders must be told."""

    partner: Callable[[Callable[[Bucket], None]], AbstractContextManager[str]]


@dataclass(frozen=True, kw_only=True)
class BackendExample(Example):
    """`world_size` ranks (two at most on a small machine) that must train as one rank does."""

    world_size: int = 1
