"""Engines: the innermost call of the chain: one HTTP request to one upstream, on one pool of connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from slime_core.errors import EngineError, EngineUnavailable
from slime_core.types.completion import Completion, GenerateRequest
from slime_router.errors import BadAnswer, Refused
from slime_router.server.events import Stream
from slime_router.server.session_key import SESSION_KEY
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstream, Upstreams
from slime_router.wire import WireCompletion, WireRequest

UNAVAILABLE: Final = frozenset({429, 502, 503})
"""Statuses that say that nothing was generated, and that it may be tried again."""
TOKEN_REFUSED: Final = frozenset({401, 403})
ROUTER_ERROR: Final = "x-smg-error-code"
"""Set by sglang-router where it, not an engine, answers."""
LOST: Final = "call_upstream"
"""So begins what it sets, beside status 500, when it lost the engine."""
KEEPALIVE_S: Final = 4.0
"""Less than the 5 s after which SGLang's server closes an idle connection."""
log = logging.getLogger("slime_router")


@dataclass(slots=True)
class Call:
    """What the endpoint and the innermost call tell each other about one request."""

    stream: bool = False
    index: int | None = None
    send: Callable[[bytes], Awaitable[None]] | None = None
    """Takes events of a stream as they come."""
    keep: bool = True
    """Middlewares may look into the answer."""
    sent: bool = False
    """Something of the answer has reached the caller."""
    received: WireCompletion | None = None
    at_engine: bool = False
    aborted: bool = False
    """By POST /abort_request: no engine is asked any more."""


class Engines:
    """Calling order: `open`, any number of `generate`, `close`."""

    def __init__(self, upstreams: Upstreams, settings: Settings) -> None:
        self._upstreams = upstreams
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.aborted = 0

    async def open(self) -> None:
        headers = {"content-type": "application/json"}
        if self._settings.upstream_token is not None:
            headers["authorization"] = f"Bearer {self._settings.upstream_token}"
        self._session = aiohttp.ClientSession(
            # How many requests are in flight is bounded where they come in.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # The deadline is that of the whole request, attempts and all, and runs where it came in.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            headers=headers,
            auto_decompress=False,
            # What an engine answers is read in large pieces.
            read_bufsize=2**18,
        )
        self._keep(asyncio.create_task(self._upstreams.probe_for_ever(self._session)))

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def generate(self, request: GenerateRequest, call: Call) -> Completion:
        """EngineUnavailable if it may be asked again; Refused, BadAnswer or EngineError if not."""
        assert isinstance(request, WireRequest)
        if call.sent:
            raise EngineError(f"request {request.request_id}: a part of its answer was sent already")
        upstream = self._upstreams.choose(request.engines)
        if upstream is None:
            raise EngineUnavailable(f"request {request.request_id}: {self._nowhere()}")
        upstream.in_flight += 1
        upstream.sent += 1
        try:
            return await self._ask(upstream, request, call)
        except asyncio.CancelledError:
            self._keep(asyncio.create_task(self._abort(upstream, request.request_id)))
            raise
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            upstream.failed += 1
            raise self._failure(upstream, request, call, error) from error
        except EngineError:
            upstream.failed += 1
            raise
        finally:
            upstream.in_flight -= 1

    def _nowhere(self) -> str:
        if not len(self._upstreams):
            return "there is no upstream; POST /workers adds one"
        down = ", ".join(upstream.url for upstream in self._upstreams if not upstream.up)
        return f"none of the upstreams that it may go to can be reached (down: {down or 'none'})"

    def _failure(self, upstream: Upstream, request: GenerateRequest, call: Call, error: BaseException) -> EngineError:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = f"{upstream.url}: request {request.request_id}: {said}"
        if isinstance(error, aiohttp.ClientConnectorError):
            upstream.up = False
        return EngineError(f"{text}, within the stream") if call.sent else EngineUnavailable(text)

    async def _ask(self, upstream: Upstream, request: WireRequest, call: Call) -> Completion:
        assert self._session is not None
        headers = {} if request.session_id is None else {SESSION_KEY: request.session_id}
        url = f"{upstream.url}/generate"
        async with self._session.post(url, data=request.outgoing(), headers=headers) as answer:
            if answer.status != 200:
                raise refusal(upstream, answer, await answer.read())
            if call.stream and answer.content_type == "text/event-stream":
                return await self._pass_on(upstream, request, call, answer)
            body = await answer.read()
        if not looks_like_json(body):
            raise BadAnswer(
                f"{upstream.url} answered request {request.request_id} with what is no JSON object; it begins with "
                f"{body[:80].decode(errors='replace')!r}"
            )
        return self._received(upstream, request, call, [body])

    async def _pass_on(
        self, upstream: Upstream, request: WireRequest, call: Call, answer: aiohttp.ClientResponse
    ) -> Completion:
        assert call.send is not None
        stream = Stream(index=call.index, keep=call.keep)
        async for chunk in answer.content.iter_any():
            if events := stream.feed(chunk):
                call.sent = True
                await call.send(events)
        if not stream.ended:
            raise aiohttp.ClientPayloadError("the stream broke off")
        return self._received(upstream, request, call, stream.parts)

    def _received(self, upstream: Upstream, request: WireRequest, call: Call, parts: list[bytes]) -> WireCompletion:
        call.received = WireCompletion.of(parts or [b""], request_id=request.request_id, engine_index=upstream.number)
        return call.received

    def abort_everywhere(self, body: bytes) -> None:
        for upstream in self._upstreams:
            self._keep(asyncio.create_task(self._tell(upstream, body)))

    async def _abort(self, upstream: Upstream, request_id: str) -> None:
        self.aborted += 1
        await self._tell(upstream, msgspec.json.encode({"rid": request_id}))

    async def _tell(self, upstream: Upstream, body: bytes) -> None:
        """POST /abort_request; sglang-router has no such route, so behind it each engine is told."""
        assert self._session is not None
        try:
            if await self._post_abort(upstream.url, body) != 404:
                return
            timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
            async with self._session.get(f"{upstream.url}/workers", timeout=timeout) as answer:
                workers = msgspec.json.decode(await answer.read(), type=WorkerList).workers
            await asyncio.gather(*(self._post_abort(worker.url, body) for worker in workers))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            # The connection is closed, by which an engine learns of it too, only later.
            log.warning("%s could not be told to abort: %s", upstream.url, error or type(error).__name__)

    async def _post_abort(self, url: str, body: bytes) -> int:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        async with self._session.post(f"{url}/abort_request", data=body, timeout=timeout) as answer:
            return answer.status

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Worker(msgspec.Struct):
    url: str


class WorkerList(msgspec.Struct):
    """sglang-router's GET /workers."""

    workers: list[Worker]


def looks_like_json(body: bytes) -> bool:
    """At its ends: enough to tell an answer that was cut off or is a web page, without reading it."""
    return body.lstrip()[:1] == b"{" and body.rstrip()[-1:] == b"}"


def refusal(upstream: Upstream, answer: aiohttp.ClientResponse, body: bytes) -> EngineError:
    text = f"{upstream.url} answered with status {answer.status}: {body[:200].decode(errors='replace')}"
    if answer.status in UNAVAILABLE or (answer.status == 500 and answer.headers.get(ROUTER_ERROR, "").startswith(LOST)):
        return EngineUnavailable(text)
    if answer.status in TOKEN_REFUSED:
        # As it is, the caller would take it for a word about the token that it brought itself.
        return BadAnswer(f"{text}. It wants another token of the router: say --upstream-token-file FILE.")
    return Refused(text, status=answer.status, body=body, content_type=answer.content_type)
