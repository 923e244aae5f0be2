"""WholeCalls: calls that run to their end, also if their caller is cancelled: an engine and its servers stay in one state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

END_S: Final = 5.0


class WholeCalls:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        self._shared: dict[str, asyncio.Task[None]] = {}

    async def at_once(self, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs beside all others."""
        await asyncio.shield(self._begin(call()))

    async def in_turn(self, call: Callable[[], Awaitable[None]]) -> None:
        """Runs after those that were called in turn before it."""
        await asyncio.shield(self._begin(self._next(call)))

    async def _next(self, call: Callable[[], Awaitable[None]]) -> None:
        async with self._turn:
            await call()

    async def shared(self, name: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """If a call of this name runs, waits for that one instead."""
        if (task := self._shared.get(name)) is None:
            task = self._shared[name] = self._begin(call())
            task.add_done_callback(lambda _: self._shared.pop(name))
        await asyncio.shield(task)

    def runs(self, name: str) -> bool:
        """Whether a shared call of this name runs."""
        return name in self._shared

    async def until_ended(self, name: str) -> None:
        """Returns when no shared call of this name runs, however the last one ended."""
        while (task := self._shared.get(name)) is not None:
            await asyncio.wait({task})

    async def all_ended(self) -> None:
        """For calls that have nothing to wait for any more. What does not end soon is cancelled."""
        while self._running:
            _, left = await asyncio.wait(self._running, timeout=END_S)
            for task in left:
                task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Else asyncio logs the error of a call whose caller has gone. The next call finds the state that it left.
            task.exception()
