"""fresh_first: what waits in the buffer, newest policy first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime_core.contracts.filter import BufferFilter, Versions

if TYPE_CHECKING:
    from slime_core.types.buffer_item import BufferItem


class FreshFirstFilter(BufferFilter):
    """By the oldest policy version among an item's tokens, highest first. An item without tokens is as fresh as can
    be: the current policy will write it. Equal ones go in the order in which they were added."""

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        # Sorting is stable, so position breaks ties.
        return sorted(range(len(items)), key=lambda at: -_order(versions.oldest[at]))[:num_groups]


def _order(version: int | None) -> float:
    return math.inf if version is None else version
