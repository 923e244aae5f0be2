"""oldest_first: what will soon be too old goes before it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.filter import BufferFilter, Versions

if TYPE_CHECKING:
    from slime_core.types.buffer_item import BufferItem


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestFirstFilter(BufferFilter):
    """By the oldest policy version among an item's tokens, lowest first, as long as it is within the limit: nothing that may
    still be trained is left until it may not. Items beyond the limit and items without tokens go last. Equal ones go in the
    order in which they were added."""

    max_behind: int | None
    """Versions; None: the run's max_staleness."""

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        limit = versions.max_staleness if self.max_behind is None else self.max_behind
        least = versions.trained - limit

        def order(position: int) -> float:
            version = versions.oldest[position]
            return math.inf if version is None or version < least else version

        # Sorting is stable, so position breaks ties.
        return sorted(range(len(items)), key=order)[:num_groups]
