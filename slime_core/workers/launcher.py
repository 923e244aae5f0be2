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
        """Calls a method of TrainWorker. Arguments may be what `Launcher.share` returned."""

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Calls a generator method of TrainWorker; items may be references that `EngineHandle.call` accepts."""


class Launcher(ABC):
    """Calling order: `start_trainers`, perhaps `prepare_engines`, `start_engines`, any calls on handles, `end_engine` and
    `restart_engine`, `stop`."""

    @abstractmethod
    async def start_trainers(self, specs: Sequence[TrainWorkerSpec]) -> Sequence[RankHandle]:
        """One worker per spec, in their order; not set up yet. Fills in what only the launcher knows (rendezvous). Specs are by
        role, then by rank. Roles of one call have equally many ranks, and rank r of each runs on the same device; another
        call gets other devices."""

    async def prepare_engines(self, specs: Sequence[EngineWorkerSpec]) -> None:
        """Called while trainers start on the same devices, if `start_engines` with these specs will follow. A launcher may call
        `EngineWorker.prepare_start`."""

    @abstractmethod
    async def start_engines(self, specs: Sequence[EngineWorkerSpec]) -> tuple[Sequence[EngineHandle], list[EngineInfo]]:
        """Started engines, in the order of specs, whose indices are unique and ascending over all calls. Only engines of the
        first call share devices with trainers."""

    @abstractmethod
    async def end_engine(self, index: int) -> None:
        """Kills an engine in any state, also while it starts, and frees its memory. Does nothing if it has ended."""

    @abstractmethod
    async def restart_engine(self, index: int) -> tuple[EngineHandle, EngineInfo]:
        """Calls `end_engine`, then starts another engine from the same spec on the same devices."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Puts a value where all workers can read it, once; ranks of a node read the same memory."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends all workers, also those whose call has not ended; safe to call twice."""
