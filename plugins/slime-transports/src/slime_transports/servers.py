"""Servers: concurrent calls to several servers, from a thread that does other work meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Final, TypeVar

import aiohttp

from slime_core.contracts.setup import EngineEndpoint
from slime_core.errors import EngineError, EngineUnavailable
from slime_serving.connection import NoResponse, new_pool
from slime_transports.broadcast import BroadcastError
from slime_transports.receiver import Refused, ServerEndpoint, WeightReceiver

EXPLAINED_S: Final = 2.0

T = TypeVar("T")


class Servers:
    """An event loop in its own thread. Every call ends, with a response or an EngineError."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._receivers: dict[EngineEndpoint, WeightReceiver] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weights-http", daemon=True)
        self._thread.start()
        self._pool: aiohttp.ClientSession = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> aiohttp.ClientSession:
        return new_pool()

    def call(
        self,
        engine: EngineEndpoint,
        step: Callable[[WeightReceiver], Coroutine[Any, Any, T]],
        *,
        what: str = "",
    ) -> Future[T]:
        """Starts a call. `what`: what is sent, for the error message, such as `bucket 3 of version 7`."""
        return asyncio.run_coroutine_threadsafe(self._call(engine, step, what), self._loop)

    async def _call(
        self, engine: EngineEndpoint, step: Callable[[WeightReceiver], Coroutine[Any, Any, T]], what: str
    ) -> T:
        try:
            return await step(self._receiver(engine))
        except EngineError as error:
            kind = EngineError if isinstance(error, NoResponse | EngineUnavailable) else Refused
            raise kind(f"{what}: {error}" if what else str(error)) from error

    def _receiver(self, engine: EngineEndpoint) -> WeightReceiver:
        found = self._receivers.get(engine)
        if found is None:
            kind = receiver_of(engine)
            server = kind.connection(self._pool, engine.url, engine.token, f"engine {engine.index}")
            found = self._receivers[engine] = kind(server, engine.num_ranks, self.timeout_s)
        return found

    def call_all(
        self,
        engines: Sequence[EngineEndpoint],
        step: Callable[[WeightReceiver], Coroutine[Any, Any, T]],
        *,
        what: str = "",
    ) -> list[Future[T]]:
        return [self.call(engine, step, what=what) for engine in engines]

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


def receiver_of(engine: EngineEndpoint) -> type[WeightReceiver]:
    """Raises EngineError for an endpoint without a receiver."""
    if not isinstance(engine, ServerEndpoint):
        raise EngineError(
            f"engine {engine.index} ({engine.url}): its endpoint is no slime_transports.receiver.ServerEndpoint, so it is not "
            "known how its server takes weights. Set another sync.transport; `slime plugins` lists them."
        )
    return engine.receiver


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
