"""pop_first: the default buffer filter."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.types.buffer_item import BufferItem


class PopFirstFilter(BufferFilter):
    """Chooses items in the order in which they were added."""

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        return list(range(min(num_groups, len(items))))
