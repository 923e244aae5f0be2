"""priority: takes items from the buffer by a number in the prompts' metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.errors import DataError

if TYPE_CHECKING:
    from slime_core.types.buffer_item import BufferItem
    from slime_core.types.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityFilter(BufferFilter):
    """Orders items by priority, highest first. Ties keep the order in which they were added."""

    key: str
    default: float | None

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        """DataError for a prompt without a usable priority."""
        priorities = [self._priority(item.prompt) for item in items]
        # Sorting is stable, so position breaks ties.
        return sorted(range(len(items)), key=lambda at: -priorities[at])[:num_groups]

    def _priority(self, prompt: Prompt) -> float:
        value = prompt.metadata.get(self.key, self.default)
        if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
            return value
        place = prompt.origin or f"prompt draw {prompt.group_index}"
        if value is None:
            raise DataError(
                f"buffer filter 'priority': the metadata of {place} has no {self.key!r}. "
                "Add it to every row, or set rollout.buffer_filter.default."
            )
        raise DataError(
            f"buffer filter 'priority': {self.key!r} in the metadata of {place} is {value!r}, not a number."
        )
