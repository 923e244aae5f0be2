"""GroupFilter: which finished groups are trained on. BufferFilter: which waiting groups go next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from slime_core.contracts.driver import Driver

if TYPE_CHECKING:
    from slime_core.types.buffer_item import BufferItem
    from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterDecision:
    keep: bool
    reason: str = ""
    """Why not: counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """Dropped only as long as enough candidates remain for the batch."""
    untrained: tuple[int, ...] = ()
    """Positions in the group of samples that train nothing, though they count in its statistics: of a group that is kept,
    they are marked `remove_sample`."""


class GroupFilter(ABC):
    """Pure. Sees a group with its rewards before shaping."""

    @abstractmethod
    def decide(self, group: SampleGroup) -> FilterDecision: ...


class FilterDriver(Driver[GroupFilter]):
    """Named in `rollout.filters`; they run in that order and the first that drops ends it."""

    noun: ClassVar[str] = "group filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What a choice by staleness goes by."""

    trained: int
    """Of the policy that will be trained on the step that is being filled: what version v wrote is `trained` - v behind."""
    max_staleness: int
    """Versions that a token may be behind; older ones are handled as `rollout.on_stale` says."""
    oldest: tuple[int | None, ...]
    """For each item, the lowest version that wrote any of its tokens; None: it has no tokens yet."""


class BufferFilter(ABC):
    """Chooses what goes next: from what waits in the buffer (returned, partial and surplus groups), before new prompts are
    drawn; and from the finished groups (surplus) of a pool, when more are there than the next step takes.

    Pure: replays repeat its choices only if they follow from its arguments.
    """

    @abstractmethod
    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        """Positions in `items` of at most `num_groups` items, in the order in which they are to go. A step that takes from
        a pool is filled up with the groups that finished first."""


class BufferFilterDriver(Driver[BufferFilter]):
    """Named in `rollout.buffer_filter`; registered in slime.filters too."""

    noun: ClassVar[str] = "buffer filter"
