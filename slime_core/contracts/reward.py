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
    """How the scoring of a sample ended; all but `OK` are failures, and the run file says what follows from each."""

    OK = "ok"
    WRONG = "wrong"
    """The reward raised, or gave something that is not a finite number: asked again it would do the same."""
    TIMEOUT = "timeout"
    """No answer in time."""
    INFRA = "infra"
    """What the reward depends on failed: a service, its worker process."""


@dataclass(frozen=True, slots=True)
class SpanRewards:
    """A process reward: numbers for token spans of one response. The sample's reward is their sum plus `outcome`.

    An estimator that takes them credits each at the last trainable token of its span, and what is left of the reward at
    the last trainable token of the response.
    """

    spans: Sequence[SpanReward]
    outcome: float = 0.0
    """For the response as a whole."""


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Instead of a value: this sample, of all those of its group, could not be scored."""

    outcome: Outcome
    message: str
    """What went wrong, without the prompt, which is told anyway."""


RewardValue: TypeAlias = "float | Mapping[str, float] | SpanRewards | RewardFailure"
"""A number; named numbers of which `reward_key` picks the one to train on; numbers for spans; or a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server of the run's own engines, for rewards that ask a model (`engines.reward`)."""

    url: str
    """`http://127.0.0.1:30000`, as reward workers reach it."""
    token: str | None = field(default=None, repr=False)
    """Bearer token of its requests."""
    model_path: str
    """Hugging Face folder of what it serves."""


class Reward(ABC):
    """Sees the whole group, so that answers can be compared. Called in a worker process: it may block, up to the time
    limit; it may not rely on state between calls.

    What it raises fails the whole group: RewardUnavailable and ConnectionError as `infra`, RewardTimeout and TimeoutError
    as `timeout`, everything else as `wrong`.
    """

    @abstractmethod
    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        """One value per sample, in their order; aborted and failed samples are not in `group`. Finite numbers."""


class RewardDriver(Driver[Reward]):
    """The simplest one is a plain function `def reward(sample) -> float`, which the registry accepts as it is."""

    reward_key: ClassVar[str | None] = None
    """Which of several named numbers is trained on when the run names no `reward_key`."""
    gives_spans: ClassVar[bool] = False
    """It may return `SpanRewards`: then the run's advantage must be one that takes them."""

    timeout_follows: ClassVar[tuple[str, ...]] = ()
    """Options that `timeout_s` follows: they are named when the time was not enough."""

    @classmethod
    def timeout_s(cls, config: Any, num_samples: int) -> float | None:
        """Seconds that it may take for one group of so many samples, unless the run says another time (`reward_timeout`);
        None: as long as any reward."""
        return None

    @classmethod
    def asks_engines(cls, config: Any) -> bool:
        """Whether it asks the model of `engines.reward`. Then the run needs one, and `build_asking` replaces `build`."""
        return False

    @classmethod
    def build_asking(cls, config: Any, servers: Sequence[ServedModel]) -> Reward:
        """`servers`: all serve the same model. When some are lost or replaced, another one is built; a group that could not
        be scored for their sake (`infra`, `timeout`) is then scored again."""
        raise NotImplementedError
