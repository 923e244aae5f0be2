"""TrainerBackend: a backend whose whole state is one trainer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from slime_core.contracts.backend import Layout, TrainBackend
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import CheckpointError, ModelError
from slime_training.finite_state import StateTensor, first_nonfinite, nonfinite_of_ranks


class JoinedRanks(Protocol):
    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks of the role; None: a single rank without a process group."""

    def leave(self) -> None: ...


class RankPlacement(Protocol):
    @property
    def device(self) -> torch.device: ...


class RankTrainer(Protocol):
    """What one rank trains with. It has joined the others."""

    @property
    def setup(self) -> TrainerSetup: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def ranks(self) -> JoinedRanks: ...

    @property
    def placement(self) -> RankPlacement: ...


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
        if (found := first_nonfinite(self._weights)) is not None:
            raise ModelError(f"{setup.model_path}: {found}, so it cannot be trained. Use another folder.")
        # Engines that start beside it count the device's free memory.
        self.free_cache()
        return self._trainer.layout

    def free_cache(self) -> None:
        """Leaves all tensors where they are: also a bucket whose reader has not closed it yet, and gradients of an optimizer
        step that has not ended."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # Torch keeps a bucket that a reader had open when it was deleted, until this call.
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()

    @abstractmethod
    def _weights(self) -> Iterator[StateTensor]:
        """This rank's trained weights."""

    @abstractmethod
    def _moments(self) -> Iterator[StateTensor]:
        """The optimizer's state on this rank, as far as steps or a checkpoint have created it."""

    def _state(self) -> Iterator[StateTensor]:
        return chain(self._weights(), self._moments())

    def _nonfinite(self) -> str | None:
        """For the report of an optimizer step. All ranks call it."""
        trainer = self._ready
        return nonfinite_of_ranks(self._state, trainer.placement.device, trainer.ranks.group)

    def load(self, folder: Path) -> None:
        self._load(folder)
        if (found := first_nonfinite(self._state)) is not None:
            raise CheckpointError(
                f"{folder}: {found}. Resume from an older checkpoint with --ckpt-step, or start over with --fresh and a "
                "lower learning rate."
            )

    @abstractmethod
    def _load(self, folder: Path) -> None:
        """See `load`."""

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.ranks.leave()
            self._trainer = None
