"""Reward: a number (or named numbers) for every sample of a group. Runs in a worker process with a time limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup, SpanReward


class Outcome(StrEnum):
    """How the scoring of a sample ended; all but `OK` are failures, for which the run file sets a policy each."""

    OK = "ok"
    WRONG = "wrong"
    """The reward raised or did not return a finite number; a retry would give the same."""
    TIMEOUT = "timeout"
    """No response in time."""
    INFRA = "infra"
    """A dependency of the reward failed: a service or its worker process."""


@dataclass(frozen=True, slots=True)
class SpanRewards:
    """A process reward: rewards of token spans of one response. The sample's reward is their sum plus `outcome`.

    An estimator that accepts spans credits each at its last trainable token, and the rest at that of the response.
    """

    spans: Sequence[SpanReward]
    """Spans `[start, end)` of response tokens, 0 <= start < end <= R, with finite values."""
    outcome: float = 0.0
    """Reward of the whole response."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Returned instead of a value if this sample of the group could not be scored."""

    outcome: Outcome
    message: str
    """What is wrong, without the prompt, which the kernel adds."""


RewardValue: TypeAlias = "float | Mapping[str, float] | SpanRewards | RewardFailure"
"""A number; named numbers, of which `reward_key` selects the one to train on; rewards of spans; or a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server of the run's own engines, for rewards that query a model (`engines.reward`)."""

    url: str
    """`http://127.0.0.1:30000`, as reward workers reach it."""
    token: str | None = field(default=None, repr=False)
    """Bearer token of its requests."""
    model_path: str
    """Hugging Face folder of the served model."""
    engine: str = ""
    """Name of the engine that serves it: programs differ in their requests."""


class Reward(ABC):
    """Scores a whole group, so that responses can be compared. Called in a worker process: it may block, up to the time
    limit, and must not rely on state between calls.

    An exception fails the whole group: RewardUnavailable and ConnectionError as `infra`, RewardTimeout and TimeoutError
    as `timeout`, everything else as `wrong`.
    """

    @abstractmethod
    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        """Returns one value per sample, in order; numbers must be finite. Aborted and failed samples are not in `group`."""


class RewardDriver(Driver[Reward]):
    """Chosen by --reward. The simplest one is a function `def reward(sample) -> float`, which needs no driver."""

    reward_key: ClassVar[str | None] = None
    """Default of `reward_key`, the named number that is trained on; None: the run must set it."""
    gives_spans: ClassVar[bool] = False
    """True: it may return `SpanRewards`; the run's advantage must accept them."""

    timeout_follows: ClassVar[tuple[str, ...]] = ()
    """Options that `timeout_s` depends on: a timeout error names them."""

    @classmethod
    def timeout_s(cls, config: Any, num_samples: int) -> float | None:
        """Time limit (s) of one group of `num_samples`, unless the run sets `reward_timeout`; None: the default."""
        return None

    @classmethod
    def needs_reward_model(cls, config: Any) -> bool:
        """True if it queries the model of `engines.reward`: the run then needs one and calls `build_with_servers`."""
        return False

    @classmethod
    def build_with_servers(cls, config: Any, servers: Sequence[ServedModel]) -> Reward:
        """Builds the reward. servers: all serve the same model. When some are lost or replaced, it is built again, and groups
        that failed because of them (`infra`, `timeout`) are scored again."""
        raise NotImplementedError
