"""Servers: concurrent HTTP calls to several servers, from a thread that does other work meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final

import aiohttp

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError, EngineUnavailable
from slime_serving.connection import NoResponse, new_pool
from slime_sglang.connection import SglangConnection
from slime_sglang.transports.broadcast import BroadcastError

EXPLAINED_S: Final = 2.0


class Refused(EngineError):
    """The server is alive, and has refused the call."""


class Servers:
    """An event loop in its own thread. Every call ends, with a response or an EngineError."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-http", daemon=True)
        self._thread.start()
        self._pool: aiohttp.ClientSession = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> aiohttp.ClientSession:
        return new_pool()

    def post(self, engine: EngineEndpoint, path: str, body: Mapping[str, Any], *, what: str = "") -> Future[Any]:
        """Starts a call. `what`: what is sent, for the error message, such as `bucket 3 of version 7`."""
        return asyncio.run_coroutine_threadsafe(self._post(engine, path, body, what), self._loop)

    async def _post(self, engine: EngineEndpoint, path: str, body: Mapping[str, Any], what: str) -> Any:
        connection = SglangConnection(self._pool, engine.url, engine.token, f"engine {engine.index}")
        try:
            response = await connection.post(path, body, timeout_s=self.timeout_s)
        except EngineError as error:
            kind = EngineError if isinstance(error, NoResponse | EngineUnavailable) else Refused
            raise kind(f"{what}: {error}" if what else str(error)) from error
        if not isinstance(response, dict) or response.get("success") is not True:
            raise Refused(f"{what}: {connection.name}: POST {path}: the response is {response!r:.300}.")
        return response

    def get(self, engine: EngineEndpoint, path: str) -> Future[Mapping[str, Any]]:
        """Starts a GET call."""
        return asyncio.run_coroutine_threadsafe(self._get(engine, path), self._loop)

    async def _get(self, engine: EngineEndpoint, path: str) -> Mapping[str, Any]:
        connection = SglangConnection(self._pool, engine.url, engine.token, f"engine {engine.index}")
        response = await connection.get(path, timeout_s=self.timeout_s)
        if not isinstance(response, dict):
            raise EngineError(f"{connection.name}: GET {path}: the response is {response!r:.300}.")
        return response

    def call_all(
        self, engines: Sequence[EngineEndpoint], path: str, body: Mapping[str, Any], *, what: str = ""
    ) -> list[Future[Any]]:
        return [self.post(engine, path, body, what=what) for engine in engines]

    def wait(self, calls: Sequence[Future[Any]]) -> list[Any]:
        """Returns all results. Raises the first failure at once; of several, that of the first call. `calls` may include
        broadcasts: after a failed broadcast, the engine's own call gets a moment to report the cause."""
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
        """`wait`, but raises the first failure only when all calls have ended and no server reads the sent memory any more."""
        wait(calls)
        return self.wait(calls)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._pool.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def failures_of(calls: Iterable[Future[Any]]) -> list[BaseException]:
    """Errors of the calls that have ended, in their order."""
    return [error for call in calls if call.done() and (error := call.exception()) is not None]


def wait_for_responses(calls: Sequence[Future[Any]]) -> None:
    """Waits until all calls have ended. Raises the first failure that is no refusal: the capabilities of such a server are
    not known."""
    wait(calls)
    unknown = [error for error in failures_of(calls) if not isinstance(error, Refused)]
    if unknown:
        raise unknown[0]
