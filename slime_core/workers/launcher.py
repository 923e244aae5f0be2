"""Launcher: starts workers and gives handles to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from slime_core.contracts.engine import EngineInfo
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.workers.engine_worker import EngineWorkerSpec
from slime_core.workers.train_worker import TrainWorkerSpec


class RankHandle(Protocol):
    """One rank of a trained role, wherever it runs."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of TrainWorker. Arguments may be what `Launcher.share` returned."""

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """A generator method of TrainWorker; items may be references that `EngineHandle.call` accepts."""


class Launcher(ABC):
    """Calling order: `start_trainers`, `start_engines`, any calls on handles, `end_engine` and `restart_engine`, `stop`."""

    @abstractmethod
    async def start_trainers(self, specs: Sequence[TrainWorkerSpec]) -> Sequence[RankHandle]:
        """One worker per spec, in their order; not set up yet. Fills in what only the launcher knows (rendezvous). Specs are by
        role, then by rank. Roles of one call have equally many ranks, and rank r of each stands on the same device; another
        call gets other devices."""

    @abstractmethod
    async def start_engines(self, specs: Sequence[EngineWorkerSpec]) -> tuple[Sequence[EngineHandle], list[EngineInfo]]:
        """Started engines, in the order of specs, whose indices are unique over all calls and count on. Only the first call's
        share devices with trainers."""

    @abstractmethod
    async def end_engine(self, index: int) -> None:
        """Ends an engine hard in whatever state, also starting, and frees its memory. Does nothing to one that was ended."""

    @abstractmethod
    async def restart_engine(self, index: int) -> tuple[EngineHandle, EngineInfo]:
        """`end_engine`, and another one from the same spec, in the same place."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Puts a value where all workers can read it, once; ranks of a node read the same memory."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends all workers; safe to call twice."""
