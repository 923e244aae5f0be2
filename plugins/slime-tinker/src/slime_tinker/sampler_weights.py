"""OpenWeights: saved weights that are ready to be sampled from, as many as the engines hold; the rest is opened when needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import SlimeError
from slime_tinker.models import Models, SamplerWeights
from slime_tinker.notes import note


@dataclass(slots=True)
class Open:
    weights: asyncio.Future[SamplerWeights]
    users: int = 0


class OpenWeights:
    def __init__(self, models: Models, trainer: Executor) -> None:
        """`trainer`: in which all calls of `models` are made."""
        self._models = models
        self._trainer = trainer
        self._open: dict[Path, Open] = {}
        """The one that was used longest ago first."""
        self._dropping: asyncio.Future[None] | None = None
        """The last that was begun: a task that nothing refers to may be collected."""
        self._changed = asyncio.Condition()
        self._entrance = asyncio.Lock()
        """In the order in which they come: requests for open weights, one after the other, would keep out all that wait for
        others to be closed."""

    @contextlib.asynccontextmanager
    async def using(self, folder: Path) -> AsyncIterator[SamplerWeights]:
        """Inside, they stay open."""
        async with self._entrance, self._changed:
            while folder not in self._open and len(self._open) >= self._models.max_weights:
                idle = next((path for path, entry in self._open.items() if not entry.users), None)
                if idle is None:
                    await self._changed.wait()
                    continue
                await self._drop(idle)
            entry = self._open.pop(folder, None)
            if entry is None:
                loop = asyncio.get_running_loop()
                opening = loop.run_in_executor(self._trainer, self._models.open_weights, folder)
                entry = Open(weights=asyncio.ensure_future(opening))
            self._open[folder] = entry
            entry.users += 1
        try:
            yield await asyncio.shield(entry.weights)
        finally:
            entry.users -= 1
            async with self._changed:
                failed = entry.weights.done() and (entry.weights.cancelled() or entry.weights.exception() is not None)
                # Another request may have opened them again meanwhile.
                if failed and self._open.get(folder) is entry:
                    del self._open[folder]
                self._changed.notify_all()

    async def forget(self, folder: Path) -> None:
        """They are about to be deleted."""
        async with self._changed:
            while folder in self._open and self._open[folder].users:
                await self._changed.wait()
            if folder in self._open:
                await self._drop(folder)

    async def _drop(self, folder: Path) -> None:
        """To its end, also if the request that makes room is cancelled meanwhile."""
        self._dropping = asyncio.ensure_future(self._dropped(self._open.pop(folder)))
        await asyncio.shield(self._dropping)

    async def _dropped(self, entry: Open) -> None:
        await asyncio.wait([entry.weights])
        # Those that could not be opened are not there; who asked for them has the error.
        if not entry.weights.cancelled() and entry.weights.exception() is None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._trainer, entry.weights.result().drop)
            except SlimeError as error:
                # Of an engine: not the fault of the request that makes room, nor of the one that deletes them.
                note(f"weights for sampling could not be dropped: {error}")
