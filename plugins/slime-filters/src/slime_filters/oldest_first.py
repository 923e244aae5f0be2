"""oldest_first: takes items from the buffer before they are too old."""

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
    """Orders items by the oldest policy version of their tokens, lowest first, if it is within the limit, so that they are
    trained before they exceed it. Items beyond the limit and items without tokens come last. Ties keep the order in which
    they were added."""

    max_behind: int | None
    """Limit in policy versions; None: the run's max_staleness."""

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        limit = versions.max_staleness if self.max_behind is None else self.max_behind
        least = versions.trained - limit

        def order(position: int) -> float:
            version = versions.oldest[position]
            return math.inf if version is None or version < least else version

        # Sorting is stable, so position breaks ties.
        return sorted(range(len(items)), key=order)[:num_groups]
