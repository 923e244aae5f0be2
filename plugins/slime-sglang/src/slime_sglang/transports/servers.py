"""Servers: HTTP calls to several servers at once, made from a thread that has other things to do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

import aiohttp

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError, EngineUnavailable
from slime_sglang.connection import Connection, NoAnswer, new_pool
from slime_sglang.transports.broadcast import BroadcastError

EXPLAINED_S: Final = 2.0


class Refused(EngineError):
    """The server lives, and has answered that it did not do what it was asked."""


class Servers:
    """An event loop in a thread of its own. Every call ends, with an answer or an EngineError."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-http", daemon=True)
        self._thread.start()
        self._pool: aiohttp.ClientSession = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> aiohttp.ClientSession:
        return new_pool()

    def post(self, engine: EngineEndpoint, path: str, body: Mapping[str, Any], *, what: str = "") -> Future[Any]:
        """Begins a call. `what` stands in its error: `bucket 3 of version 7`."""
        return asyncio.run_coroutine_threadsafe(self._post(engine, path, body, what), self._loop)

    async def _post(self, engine: EngineEndpoint, path: str, body: Mapping[str, Any], what: str) -> Any:
        connection = Connection(self._pool, engine.url, engine.token, f"engine {engine.index}")
        try:
            answer = await connection.post(path, body, timeout_s=self.timeout_s)
        except EngineError as error:
            kind = EngineError if isinstance(error, NoAnswer | EngineUnavailable) else Refused
            raise kind(f"{what}: {error}" if what else str(error)) from error
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise Refused(f"{what}: {connection.name}: POST {path}: the answer is {answer!r:.300}.")
        return answer

    def get(self, engine: EngineEndpoint, path: str) -> Future[Mapping[str, Any]]:
        """Begins a call."""
        return asyncio.run_coroutine_threadsafe(self._get(engine, path), self._loop)

    async def _get(self, engine: EngineEndpoint, path: str) -> Mapping[str, Any]:
        connection = Connection(self._pool, engine.url, engine.token, f"engine {engine.index}")
        answer = await connection.get(path, timeout_s=self.timeout_s)
        if not isinstance(answer, dict):
            raise EngineError(f"{connection.name}: GET {path}: the answer is {answer!r:.300}.")
        return answer

    def each(
        self, engines: Sequence[EngineEndpoint], path: str, body: Mapping[str, Any], *, what: str = ""
    ) -> list[Future[Any]]:
        return [self.post(engine, path, body, what=what) for engine in engines]

    def wait(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """All results; the first failure at once, of several the one of the first call. Not only HTTP calls can be waited
        for: a broadcast that fails of an engine gives that engine's own call a moment to say more."""
        _, pending = wait(calls, timeout=self.timeout_s + 5, return_when=FIRST_EXCEPTION)
        errors = failures_of(calls)
        if errors and all(isinstance(error, BroadcastError) for error in errors):
            wait(pending, timeout=EXPLAINED_S, return_when=FIRST_EXCEPTION)
            errors = failures_of(calls)
        if errors:
            raise min(errors, key=lambda error: (not isinstance(error, EngineError), isinstance(error, BroadcastError)))
        if pending:
            raise EngineError(f"sending weights has not ended in {self.timeout_s:g} s.")
        return [call.result() for call in calls]

    def finish(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """As `wait`, but the first failure when all have ended: none uses any longer what it was sent."""
        wait(calls)
        return self.wait(calls)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def failures_of(calls: Iterable[Future[Any]]) -> list[BaseException]:
    """In their order; of those that have ended."""
    return [error for call in calls if call.done() and (error := call.exception()) is not None]


def wait_for_answers(calls: Sequence[Future[Any]]) -> None:
    """Waits until all have ended. Raises the first failure that is no refusal: what such a server can do is not known."""
    wait(calls)
    unknown = [error for error in failures_of(calls) if not isinstance(error, Refused)]
    if unknown:
        raise unknown[0]
