"""FaultyEngine: a scripted engine that can die or hang."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from slime_core.errors import EngineError
from slime_core.types.completion import Completion, GenerateRequest
from slime_plugin_kit.scripted_engine import EngineInLoop, ScriptedEngine

T = TypeVar("T")


class FaultyEngine(EngineInLoop):
    """`EngineHandle` of a scripted engine. It responds after `delay_s`, until it dies (running and later requests fail) or
    hangs (they never return). `fails_in`: the method whose call makes it die."""

    def __init__(self, *, delay_s: float = 0.0, fails_in: str | None = None, poison: str | None = None) -> None:
        """`poison`: the id of a request that kills it."""
        self.scripted = ScriptedEngine()
        super().__init__(self.scripted)
        self.delay_s = delay_s
        self.asked: list[list[str]] = []
        """Ids of the requests of each message."""
        self.calls: list[str] = []
        self._fails_in = fails_in
        self._poison = poison
        self._dead = asyncio.Event()
        self._hung = False

    def die(self) -> None:
        self._dead.set()

    def hang(self) -> None:
        self._hung = True

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        self.asked.append([request.request_id for request in requests])
        if self._poison in self.asked[-1]:
            self.die()
        completions = super().generate(requests)
        await self._unless_dead(asyncio.sleep(self.delay_s))
        while (completion := await self._unless_dead(following(completions))) is not None:
            yield completion

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if method == self._fails_in:
            self.die()
        return await self._unless_dead(super().call(method, *args))

    async def _unless_dead(self, work: Awaitable[T]) -> T:
        task, dead = asyncio.ensure_future(work), asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
            if self._hung:
                await asyncio.Event().wait()
            if self._dead.is_set():
                raise EngineError("the engine is gone")
            return task.result()
        finally:
            for waited in (task, dead):
                waited.cancel()
                with contextlib.suppress(asyncio.CancelledError, EngineError):
                    await waited


async def following(completions: AsyncIterator[Completion]) -> Completion | None:
    return await anext(completions, None)
