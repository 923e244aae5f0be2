"""Backends whose trainers can begin again while a run continues: beside `TrainBackend`, for loops of one's own."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Restartable:
    """A base beside `BackendDriver`, for backends that are a `RestartableBackend`. Nothing heavy is imported here."""


class RestartableBackend(ABC):
    """All ranks make the same calls in the same order."""

    @abstractmethod
    def new_optimizer(self) -> None:
        """Drops gradients, optimizer state and step count, as at the start of a run. The weights stay."""

    @abstractmethod
    def restart(self) -> None:
        """Loads the weights of the run's own folder once more, with `new_optimizer`."""
