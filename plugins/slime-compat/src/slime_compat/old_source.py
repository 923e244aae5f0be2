"""DataSource and pop_first, which old modules import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from slime_compat.old_sample import Sample


class DataSource(ABC):
    """Base of old data sources."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """The samples of `num_samples` prompts, by group."""

    @abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Puts groups back."""

    @abstractmethod
    def save(self, rollout_id: int) -> None:
        """Writes its state below `args.save`."""

    @abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Reads its state from below `args.load`."""

    @abstractmethod
    def __len__(self) -> int: ...


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Takes the oldest groups out of the buffer."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken
