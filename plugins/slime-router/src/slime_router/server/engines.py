"""Engines: the innermost call of the chain. It sends one HTTP request to one upstream, from one connection pool."""

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
from slime_router.errors import BadRequest, BadResponse, Refused
from slime_router.server.events import Stream
from slime_router.server.programs import PROGRAMS, Abort
from slime_router.server.session_key import SESSION_KEY
from slime_router.server.settings import Settings
from slime_router.server.upstreams import Upstream, Upstreams
from slime_router.wire import WireCompletion, WireRequest

UNAVAILABLE: Final = frozenset({429, 502, 503})
"""Statuses of requests that generated nothing and may be sent again."""
TOKEN_REFUSED: Final = frozenset({401, 403})
ROUTER_ERROR: Final = "x-smg-error-code"
"""Header that sglang-router sets when the response is its own and not an engine's."""
LOST: Final = "call_upstream"
"""Beginning of that header's value, with status 500, when sglang-router lost the engine."""
KEEPALIVE_S: Final = 4.0
"""Less than the 5 s after which SGLang's server closes an idle connection."""
log = logging.getLogger("slime_router")


@dataclass(slots=True)
class Call:
    """State of one request that the endpoint and the innermost call share."""

    stream: bool = False
    index: int | None = None
    send: Callable[[bytes], Awaitable[None]] | None = None
    """Sends events of a stream to the caller as they arrive."""
    keep: bool = True
    """Middlewares may read the response."""
    sent: bool = False
    """A part of the response has been sent to the caller."""
    received: WireCompletion | None = None
    at_engine: bool = False
    aborted: bool = False
    """By POST /abort_request: the request is not sent to an engine any more."""


class Engines:
    """Calling order: `open`, any number of `generate`, `close`."""

    def __init__(self, upstreams: Upstreams, settings: Settings) -> None:
        self._upstreams = upstreams
        self._settings = settings
        self._program = PROGRAMS[settings.program]
        self._session: aiohttp.ClientSession | None = None
        self._background: set[asyncio.Task[None]] = set()
        self.aborted = 0

    async def open(self) -> None:
        headers = {"content-type": "application/json"}
        if self._settings.upstream_token is not None:
            headers["authorization"] = f"Bearer {self._settings.upstream_token}"
        self._session = aiohttp.ClientSession(
            # The number of requests in flight is limited in Generate.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            # The deadline of the whole request, with all attempts, is kept in Generate.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
            headers=headers,
            auto_decompress=False,
            # Responses of engines are read in large pieces.
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
        """Raises EngineUnavailable if the request may be sent again; Refused, BadResponse or EngineError if not."""
        assert isinstance(request, WireRequest)
        if call.sent:
            raise EngineError(f"request {request.request_id}: a part of its response was sent already")
        upstream = self._upstreams.choose(request.engines)
        if upstream is None:
            raise EngineUnavailable(f"request {request.request_id}: {self._nowhere()}")
        upstream.in_flight += 1
        upstream.sent += 1
        try:
            return await self._post(upstream, request, call)
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
            return "there is no upstream. POST /workers adds one"
        down = ", ".join(upstream.url for upstream in self._upstreams if not upstream.up)
        return f"none of the upstreams that may serve it can be reached (down: {down or 'none'})"

    def _failure(self, upstream: Upstream, request: GenerateRequest, call: Call, error: BaseException) -> EngineError:
        given = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        text = f"{upstream.url}: request {request.request_id}: {given}"
        if isinstance(error, aiohttp.ClientConnectorError):
            upstream.up = False
        return EngineError(f"{text}, within the stream") if call.sent else EngineUnavailable(text)

    async def _post(self, upstream: Upstream, request: WireRequest, call: Call) -> Completion:
        assert self._session is not None
        headers = {} if request.session_id is None else {SESSION_KEY: request.session_id}
        url = upstream.url + self._program.generate
        if call.stream and not self._program.streams:
            raise BadRequest(f"request {request.request_id}: no streams with --program {self._settings.program}")
        async with self._session.post(url, data=self._program.outgoing(request), headers=headers) as response:
            if response.status != 200:
                raise refusal(upstream, response, await response.read())
            if call.stream and response.content_type == "text/event-stream":
                return await self._pass_on(upstream, request, call, response)
            body = await response.read()
        if not looks_like_json(body):
            raise BadResponse(
                f"{upstream.url}: the response to request {request.request_id} is not a JSON object. It begins with "
                f"{body[:80].decode(errors='replace')!r}"
            )
        return self._received(upstream, request, call, [self._program.incoming(body)])

    async def _pass_on(
        self, upstream: Upstream, request: WireRequest, call: Call, response: aiohttp.ClientResponse
    ) -> Completion:
        assert call.send is not None
        stream = Stream(index=call.index, keep=call.keep)
        async for chunk in response.content.iter_any():
            if events := stream.feed(chunk):
                call.sent = True
                await call.send(events)
        if not stream.ended:
            raise aiohttp.ClientPayloadError("the stream ended too early")
        return self._received(upstream, request, call, stream.parts)

    def _received(self, upstream: Upstream, request: WireRequest, call: Call, parts: list[bytes]) -> WireCompletion:
        call.received = WireCompletion.of(parts or [b""], request_id=request.request_id, engine_index=upstream.number)
        return call.received

    def abort_everywhere(self, asked: Abort) -> None:
        for upstream in self._upstreams:
            self._keep(asyncio.create_task(self._send_abort(upstream, self._program.abort_body(asked))))

    async def _abort(self, upstream: Upstream, request_id: str) -> None:
        self.aborted += 1
        await self._send_abort(upstream, self._program.abort_body(Abort(rid=request_id)))

    async def _send_abort(self, upstream: Upstream, body: bytes) -> None:
        """Sends an abort. sglang-router has no such route, so behind it the request is sent to each engine."""
        assert self._session is not None
        try:
            if await self._post_abort(upstream.url, body) != 404:
                return
            timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
            async with self._session.get(f"{upstream.url}/workers", timeout=timeout) as response:
                workers = msgspec.json.decode(await response.read(), type=WorkerList).workers
            await asyncio.gather(*(self._post_abort(worker.url, body) for worker in workers))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            # The engine also aborts when it notices the closed connection, only later.
            log.warning("%s: the abort request failed: %s", upstream.url, error or type(error).__name__)

    async def _post_abort(self, url: str, body: bytes) -> int:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        async with self._session.post(url + self._program.abort, data=body, timeout=timeout) as response:
            return response.status

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class Worker(msgspec.Struct):
    url: str


class WorkerList(msgspec.Struct):
    """Response of sglang-router's GET /workers."""

    workers: list[Worker]


def looks_like_json(body: bytes) -> bool:
    """Whether `body` begins and ends as a JSON object. Detects a response that was cut or is a web page, without parsing."""
    return body.lstrip()[:1] == b"{" and body.rstrip()[-1:] == b"}"


def refusal(upstream: Upstream, response: aiohttp.ClientResponse, body: bytes) -> EngineError:
    text = f"{upstream.url} responded with status {response.status}: {body[:200].decode(errors='replace')}"
    if response.status in UNAVAILABLE or (
        response.status == 500 and response.headers.get(ROUTER_ERROR, "").startswith(LOST)
    ):
        return EngineUnavailable(text)
    if response.status in TOKEN_REFUSED:
        # Passed unchanged, the caller would take the status for one about its own token.
        return BadResponse(f"{text}. The upstream requires another token: pass --upstream-token-file FILE.")
    return Refused(text, status=response.status, body=body, content_type=response.content_type)
