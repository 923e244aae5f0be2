"""OwnNumbers: group indices of prompts and datums that are not drawn from the run's data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

FIRST_OWN: Final = 1 << 40
"""Group index of the first one, in each block of a rollout step."""
BLOCK: Final = 1 << 20


@dataclass(slots=True)
class OwnNumbers:
    _of_step: int = 0
    _of_adapter: Counter[str] = field(default_factory=Counter)

    def step_ended(self) -> None:
        self._of_step = 0

    def next_of_step(self, rollout_id: int, count: int) -> int:
        """The first of `count` indices that no data source gives, the same in a run that resumes here."""
        first = FIRST_OWN + rollout_id * BLOCK + self._of_step
        self._of_step += count
        return first

    def next_prompts(self, rollout_id: int, adapter: str | None, count: int) -> tuple[str, int]:
        """Scope and first index of prompts, counted for each adapter, so that its samples do not depend on the others."""
        if adapter is None:
            return "own", self.next_of_step(rollout_id, count)
        first = FIRST_OWN + self._of_adapter[adapter]
        self._of_adapter[adapter] += count
        return f"own/{adapter}", first
