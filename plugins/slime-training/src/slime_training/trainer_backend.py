"""TrainerBackend: a backend whose whole state is one trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from slime_core.contracts.backend import Layout, TrainBackend
from slime_core.contracts.setup import TrainerSetup


class JoinedRanks(Protocol):
    def leave(self) -> None: ...


class RankTrainer(Protocol):
    """What one rank trains with. It has joined the others."""

    @property
    def layout(self) -> Layout: ...

    @property
    def ranks(self) -> JoinedRanks: ...


T = TypeVar("T", bound=RankTrainer)


class TrainerBackend(TrainBackend, Generic[T]):
    """`setup` makes the trainer, `close` leaves its ranks and lets it go."""

    def __init__(self, make_trainer: Callable[[TrainerSetup], T]) -> None:
        self._make_trainer = make_trainer
        self._trainer: T | None = None

    @property
    def _ready(self) -> T:
        if self._trainer is None:
            raise RuntimeError("call setup first")
        return self._trainer

    def setup(self, setup: TrainerSetup) -> Layout:
        self._trainer = self._make_trainer(setup)
        return self._trainer.layout

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.ranks.leave()
            self._trainer = None
