"""POST /generate: through the middlewares to an upstream and back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive, Scope, Send

from slime_core.contracts.middleware import Next, RouterMiddleware
from slime_core.errors import EngineError, EngineUnavailable, SlimeError
from slime_core.rollout.middleware_calls import around
from slime_core.types.completion import Completion, FinishReason, GenerateRequest
from slime_router.errors import BadRequest, BadResponse, Refused, TooManyRequests
from slime_router.requests import Parsed, parse
from slime_router.server.engines import Call, Engines
from slime_router.server.events import END
from slime_router.server.json_response import error_body
from slime_router.server.metrics import Metrics
from slime_router.server.session_key import SESSION_KEY
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstreams
from slime_router.wire import WireRequest, response_body

T = TypeVar("T")
JSON: Final = (b"content-type", b"application/json")
EVENTS: Final = (b"content-type", b"text/event-stream; charset=utf-8")
SESSION_HEADER: Final = SESSION_KEY.encode()
RETRY_AFTER_S: Final = 1.0
"""Default, for errors without a waiting time of their own."""


class CallerGone(Exception):
    """The caller has closed its connection."""


class TooLarge(BadRequest):
    """The body has more bytes than the limit."""


class Generate:
    """ASGI app of POST /generate, without Starlette's overhead, since most of the time is spent here."""

    def __init__(
        self,
        engines: Engines,
        upstreams: Upstreams,
        middlewares: Sequence[RouterMiddleware],
        settings: Settings,
        metrics: Metrics,
    ) -> None:
        self._engines = engines
        self._upstreams = upstreams
        self._middlewares = tuple(middlewares)
        self._settings = settings
        self._metrics = metrics
        self._in_flight = 0
        self._under_way: dict[asyncio.Future[Completion], tuple[str, Call]] = {}

    def abort(self, request_id: str, *, everything: bool) -> None:
        """Cancels requests that wait in a middleware. A request at an engine is ended by the engine, and not sent again."""
        for work, (name, call) in list(self._under_way.items()):
            if everything or name == request_id:
                call.aborted = True
                if not call.at_engine and call.received is None:
                    work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = time.perf_counter()
        writer = ResponseWriter(send)
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._serve(scope, receive, writer)
        except CallerGone:
            writer.status = 499
        except (SlimeError, TimeoutError) as error:
            await writer.fail(error, self._settings)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
            self._metrics.count(writer.status, time.perf_counter() - begun)

    async def _serve(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        body = await read_body(receive, self._settings.max_body_bytes)
        if self._in_flight > self._settings.max_in_flight:
            raise EngineUnavailable(f"{self._settings.max_in_flight} requests are in flight already")
        session = next((value.decode("latin-1") for name, value in scope["headers"] if name == SESSION_HEADER), None)
        parsed = parse(body, session_id=session, read_tokens=bool(self._middlewares))
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(cancel_when_gone(receive, task))
        try:
            await (self._stream(parsed, writer) if parsed.stream else self._whole(parsed, writer))
        except asyncio.CancelledError:
            if watch.done() and not watch.cancelled():
                task.uncancel()
                raise CallerGone from None
            raise
        finally:
            watch.cancel()

    async def _whole(self, parsed: Parsed, writer: ResponseWriter) -> None:
        if not parsed.batch:
            await writer.whole(await self._one(parsed.requests[0], Call()))
            return
        async with Together() as together:
            works = [together.start(self._one(request, Call())) for request in parsed.requests]
        await writer.whole(b"[" + b",".join(work.result() for work in works) + b"]")

    async def _stream(self, parsed: Parsed, writer: ResponseWriter) -> None:
        async with Together() as together:
            for number, request in enumerate(parsed.requests):
                index = number if parsed.batch else None
                call = Call(stream=True, index=index, send=writer.events, keep=bool(self._middlewares))
                together.start(self._one_streamed(request, call, writer))
        await writer.end()

    async def _one_streamed(self, request: WireRequest, call: Call, writer: ResponseWriter) -> None:
        body = await self._one(request, call)
        if not call.sent:
            # The response came from a middleware, or the upstream did not stream.
            stamp = b"" if call.index is None else b'"index":%d,' % call.index
            await writer.events(b"data: {" + stamp + body.lstrip()[1:] + b"\n\n")

    async def _one(self, request: WireRequest, call: Call) -> bytes:
        async def innermost(asked: GenerateRequest) -> Completion:
            if call.aborted:
                return Completion.empty(asked, FinishReason.ABORT)
            call.at_engine = True
            try:
                return await self._engines.generate(asked, call)
            finally:
                call.at_engine = False

        chain: Next = innermost
        for middleware in reversed(self._middlewares):
            chain = around(middleware, chain)
        asked = replace(request, engines=self._upstreams.in_turn())
        completion = await (self._abortable(chain, asked, call) if self._middlewares else chain(asked))
        return b"" if call.sent else response_body(completion, call.received)

    async def _abortable(self, chain: Next, asked: WireRequest, call: Call) -> Completion:
        work = asyncio.ensure_future(chain(asked))
        self._under_way[work] = asked.request_id, call
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not call.aborted or (task is not None and task.cancelling()):
                raise
            return Completion.empty(asked, FinishReason.ABORT)
        finally:
            del self._under_way[work]


class Together:
    """Tasks of the sequences of one POST: the first failure cancels the others, and is raised unchanged."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def __aenter__(self) -> Together:
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


class ResponseWriter:
    """Writes the response to the caller: the head once, then the body or events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self.status = 200

    async def whole(self, body: bytes) -> None:
        await self._head(self.status, JSON, (b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.body", "body": body})

    async def events(self, events: bytes) -> None:
        """Sends events. Waits while the caller reads too slowly, so the upstream waits too."""
        if not self._begun:
            await self._head(200, EVENTS, (b"cache-control", b"no-cache"))
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": END})

    async def fail(self, error: SlimeError | TimeoutError, settings: Settings) -> None:
        self.status, text = status_of(error), str(error)
        if isinstance(error, TimeoutError):
            text = f"no response within {settings.timeout_s:g} s"
        if self._begun:
            # The status has been sent. As in SGLang, the error is an event.
            await self.events(b"data: " + error_body(self.status, text) + b"\n\n")
            await self.end()
            return
        if isinstance(error, Refused):
            await self._head(error.status, (b"content-type", error.content_type.encode("latin-1")))
            await self._send({"type": "http.response.body", "body": error.body})
            return
        body = error_body(self.status, text)
        more = [(b"content-length", b"%d" % len(body))]
        if isinstance(error, EngineUnavailable):
            wait_s = error.retry_after_s if isinstance(error, TooManyRequests) else RETRY_AFTER_S
            more.append((b"retry-after", b"%d" % math.ceil(wait_s)))
        await self._head(self.status, JSON, *more)
        await self._send({"type": "http.response.body", "body": body})

    async def _head(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self._begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def status_of(error: SlimeError | TimeoutError) -> int:
    statuses: tuple[tuple[type[Exception], int], ...] = (
        (TimeoutError, 504),
        (TooLarge, 413),
        (BadRequest, 400),
        (TooManyRequests, 429),
        (EngineUnavailable, 503),
        (BadResponse, 502),
        (EngineError, 502),
    )
    if isinstance(error, Refused):
        return error.status
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    total = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        piece = message.get("body", b"")
        total += len(piece)
        if total > max_bytes:
            raise TooLarge(f"the body of POST /generate has more than {max_bytes} bytes")
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def cancel_when_gone(receive: Receive, task: asyncio.Task[Any]) -> None:
    """Cancels `task` on disconnect, then returns: so a task that was cancelled for another reason sees this one running."""
    while (await receive())["type"] != "http.disconnect":
        pass
    task.cancel()
