"""Collector: collects the groups of one training step."""

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
"""An event whose order decided which groups a step has: JSON values that only the collector reads."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class RolloutOptions(Protocol):
    """Keys of the rollout table that a collector may not support."""

    @property
    def n_samples_per_prompt(self) -> int: ...

    @property
    def filters(self) -> Sequence[Named]: ...


class Collector(ABC, Generic[ContextT]):
    """The kernel's own (`accepted`) takes prompts from the buffer, generates, scores and filters."""

    @abstractmethod
    async def collect(self, step: int, context: ContextT) -> list[SampleGroup]:
        """Returns exactly `rollout_batch_size` accepted groups in submission order, else raises RolloutError. step: rollout
        id, from 0; context: the step's prompts, runner, filters and policy version."""

    async def flush_to_buffer(self, *, graceful: bool) -> None:
        """Moves all groups held between steps into the buffer, with their samples so far: before a checkpoint and at the
        end of a run. graceful: wait for work that cannot be interrupted soon; if False, drop it."""

    def drain_events(self) -> Sequence[CollectorEvent]:
        """Returns the events since the last call, in order."""
        return ()

    def replay_events(self, events: Sequence[CollectorEvent]) -> None:
        """From now on follows the order of `events`, recorded by an identical run; after the last one, the order of arrival."""

    async def settled(self) -> None:
        """Waits until all replayed events before a flush have happened; returns at once if no events are replayed."""


class CollectorDriver(Driver[Collector[Any]]):
    """Chosen by rollout.collector."""

    across_steps: ClassVar[bool] = False
    """Groups may continue from one step to the next: with in-flight weight updates `collect` is called for several steps at
    once, their groups are generated concurrently, and interrupted groups can be continued."""

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        """False: nothing is generated (steps come from a dump, or responses from the data), and no engine is started."""
        return True

    @classmethod
    def reads_prompts(cls, config: Any) -> bool:
        """True if it takes prompts from the buffer; if False, no data source is opened."""
        return cls.needs_engine(config)

    @classmethod
    def problems(cls, config: Any, rollout: RolloutOptions) -> list[str]:
        """Conflicts between its options and the rollout table; empty if there are none."""
        return []
