"""GroupFilter: decides which finished groups are trained on. BufferFilter: chooses which waiting groups are used next."""

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
    """True: train on the group; False: drop it."""
    reason: str = ""
    """Why it was dropped, counted as `rollout/dynamic_filter/drop_<reason>`."""
    keep_when_insufficient: bool = False
    """If True, it is dropped only while enough other groups remain for the batch."""
    masked_indices: tuple[int, ...] = ()
    """Positions in a kept group of samples to exclude from training (`remove_sample`); they count in its statistics."""


class GroupFilter(ABC):
    """Pure. Sees a group with its rewards before shaping."""

    @abstractmethod
    def decide(self, group: SampleGroup) -> FilterDecision:
        """Decides on one finished group, with rewards before shaping; a sample that was not scored has reward None."""


class FilterDriver(Driver[GroupFilter]):
    """Named in `rollout.filters`; they run in that order, until one drops the group."""

    noun: ClassVar[str] = "group filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Policy versions, for a choice by staleness."""

    trained: int
    """Policy version that will train on this step: the staleness of tokens of version v is `trained` - v."""
    max_staleness: int
    """Largest allowed staleness of a token; rollout.on_stale decides what happens to older ones."""
    oldest: tuple[int | None, ...]
    """For each item the lowest version that sampled any of its tokens; None: it has no tokens yet."""


class BufferFilter(ABC):
    """Chooses the next groups: from those waiting in the buffer (returned, partial, surplus) before new prompts are drawn,
    and from the finished groups (surplus) of a pool when it has more than the next step needs.

    Pure: a replay repeats its choices only if they depend on nothing but the arguments.
    """

    @abstractmethod
    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        """Returns positions of at most `num_groups` of `items`, in the order of use. versions: policy versions of the step and
        of the items. A step that takes from a pool is filled up with the groups that finished first."""


class BufferFilterDriver(Driver[BufferFilter]):
    """Named in `rollout.buffer_filter`; registered in slime.filters too."""

    noun: ClassVar[str] = "buffer filter"
