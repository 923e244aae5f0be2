"""EngineClient: one entrance to all engines, with a bound on what is in flight.

Requests that are made in one turn of the event loop travel together and enter an engine together. So a wave of prompts
makes the same batches each time, and ten thousand requests are a few messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineError
from slime_core.types.completion import Completion, FinishReason, GenerateRequest


class EngineHandle(Protocol):
    """One engine, wherever it runs."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Completions as they end. All requests enter the engine together."""

    async def call(self, method: str, *args: Any) -> Any:
        """A method of the engine contract."""


class EngineClient:
    """Spreads requests over engines in turn, at most `concurrency` per engine; the rest wait in order."""

    def __init__(
        self, engines: Sequence[EngineHandle], *, concurrency: int, middlewares: Sequence[RouterMiddleware] = ()
    ) -> None:
        self._engines = tuple(engines)
        self._concurrency = concurrency
        self._waiting: deque[GenerateRequest] = deque()
        self._answers: dict[str, asyncio.Future[Completion]] = {}
        self._running = [0] * len(self._engines)
        self._next_engine = 0
        self._flush_planned = False
        self._streams: set[asyncio.Task[None]] = set()
        self._entrance: Next = self._submit
        for middleware in reversed(middlewares):
            self._entrance = around(middleware, self._entrance)

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Through the middlewares to an engine and back. EngineError if the engine fails."""
        completion: Completion = await self._entrance(request)
        return completion

    async def each(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of the engine contract on every engine at once."""
        return list(await asyncio.gather(*(engine.call(method, *args) for engine in self._engines)))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests; those still waiting here are answered with nothing."""
        wanted = set(request_ids)
        waiting = [request for request in self._waiting if request.request_id in wanted]
        if waiting:
            self._waiting = deque(request for request in self._waiting if request.request_id not in wanted)
            for request in waiting:
                answer = self._answers.pop(request.request_id)
                if not answer.done():
                    answer.set_result(Completion.empty(request, FinishReason.ABORT))
        running = [request_id for request_id in request_ids if request_id in self._answers]
        if running:
            await self.each("abort", running)

    async def _submit(self, request: GenerateRequest) -> Completion:
        loop = asyncio.get_running_loop()
        if request.request_id in self._answers:
            raise EngineError(f"request id {request.request_id} is in flight already; ids are unique")
        answer: asyncio.Future[Completion] = loop.create_future()
        self._answers[request.request_id] = answer
        self._waiting.append(request)
        self._plan_flush()
        try:
            return await answer
        finally:
            self._answers.pop(request.request_id, None)
            if answer.cancelled() and request in self._waiting:
                self._waiting.remove(request)

    def _plan_flush(self) -> None:
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        chosen: list[list[GenerateRequest]] = [[] for _ in self._engines]
        while self._waiting and (engine := self._free_engine()) is not None:
            chosen[engine].append(self._waiting.popleft())
            self._running[engine] += 1
        for number, requests in enumerate(chosen):
            if requests:
                task = asyncio.create_task(self._stream(number, requests))
                self._streams.add(task)
                task.add_done_callback(self._streams.discard)

    def _free_engine(self) -> int | None:
        """Engines in turn, so that where a request goes does not depend on how fast others are answered."""
        for offset in range(len(self._engines)):
            number = (self._next_engine + offset) % len(self._engines)
            if self._running[number] < self._concurrency:
                self._next_engine = (number + 1) % len(self._engines)
                return number
        return None

    async def _stream(self, number: int, requests: Sequence[GenerateRequest]) -> None:
        open_ids = {request.request_id for request in requests}
        failure: Exception = EngineError(f"engine {number} ended its answer before all requests were done")
        try:
            async for completion in self._engines[number].generate(requests):
                if completion.request_id not in open_ids:
                    raise EngineError(f"engine {number} answered {completion.request_id}, which it was not asked for")
                open_ids.remove(completion.request_id)
                self._running[number] -= 1
                answer = self._answers.get(completion.request_id)
                if answer is not None and not answer.done():
                    answer.set_result(completion)
                if self._waiting:
                    self._plan_flush()
        except Exception as error:  # noqa: BLE001 - whatever an engine raises reaches those who wait for it
            failure = error
        finally:
            self._running[number] -= len(open_ids)
            for request_id in open_ids:
                answer = self._answers.get(request_id)
                if answer is not None and not answer.done():
                    answer.set_exception(failure)
            if self._waiting:
                self._plan_flush()


def around(middleware: RouterMiddleware, call_next: Next) -> Next:
    async def call(request: GenerateRequest) -> Completion:
        return await middleware(request, call_next)

    return call
