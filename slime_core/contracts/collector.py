"""Collector: how the groups of one training step come together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup

ContextT = TypeVar("ContextT", contravariant=True)
"""`slime_core.rollout.context.RolloutContext`."""


CollectorEvent: TypeAlias = Sequence[Any]
"""Something whose time decided which groups a step has: JSON values that the collector alone reads."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class RolloutOptions(Protocol):
    """The keys of the rollout table that a collector may not fit."""

    @property
    def n_samples_per_prompt(self) -> int: ...

    @property
    def filters(self) -> Sequence[Named]: ...


class Collector(ABC, Generic[ContextT]):
    """The kernel's own (`accepted`) asks the buffer for prompts, generates, scores and filters."""

    @abstractmethod
    async def collect(self, step: int, context: ContextT) -> list[SampleGroup]:
        """Exactly `rollout_batch_size` accepted groups, in submission order; RolloutError if they cannot be had."""

    async def give_back(self, *, patient: bool) -> None:
        """Puts everything that it holds between two steps into the buffer, with what is known of it: before a checkpoint
        and at the end of a run. `patient`: what cannot be broken off soon is waited for, else given up."""

    def recorded(self) -> Sequence[CollectorEvent]:
        """What happened since the last call, in order."""
        return ()

    def follow(self, events: Sequence[CollectorEvent]) -> None:
        """From now on things happen in the order of these, which an equal run recorded; after the last one, as they come."""

    async def settled(self) -> None:
        """Returns when nothing more is to happen before everything is given back; at once, unless it follows events."""


class CollectorDriver(Driver[Collector[Any]]):
    """Chosen by rollout.collector."""

    across_steps: ClassVar[bool] = False
    """Groups may go on from one step to the next: where weights are published in flight, `collect` is called for several
    steps at once, and their groups are made side by side; what is broken off can be continued."""

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        """False: nothing is generated (steps come from a dump, or answers from the data), so no engine is started."""
        return True

    @classmethod
    def reads_prompts(cls, config: Any) -> bool:
        """Whether it takes prompts from the buffer; if not, no data source is opened."""
        return cls.needs_engine(config)

    @classmethod
    def problems(cls, config: Any, rollout: RolloutOptions) -> list[str]:
        """Everything in the rollout table that does not fit it; empty if all does."""
        return []
