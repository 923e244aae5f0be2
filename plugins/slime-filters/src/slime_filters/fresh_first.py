"""fresh_first: takes items from the buffer, newest policy first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.contracts.filter import BufferFilter, Versions

if TYPE_CHECKING:
    from slime_core.types.buffer_item import BufferItem


class FreshFirstFilter(BufferFilter):
    """Orders items by the oldest policy version of their tokens, highest first. Items without tokens come first, since the
    current policy will generate them. Ties keep the order in which they were added."""

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        # Sorting is stable, so position breaks ties.
        return sorted(range(len(items)), key=lambda at: -_order(versions.oldest[at]))[:num_groups]


def _order(version: int | None) -> float:
    return math.inf if version is None else version
