"""Connection: JSON over HTTP to one server, with its token, over the engine's connection pool."""

from __future__ import annotations

import errno
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import aiohttp
import orjson

from slime_core.errors import EngineError, EngineRefused, EngineUnavailable

IDLE_S: Final = 3.0
"""A connection that was idle for longer is not used again: an external server closes it after five seconds."""
OTHER_FILES: Final = 1024
"""Open files that are not connections."""
SHOWN: Final = 1000
"""Characters of an unexpected response."""
NO_TOKEN: Final = frozenset({401, 403})
UNAVAILABLE: Final = frozenset({408, 425, 429, 503})
"""Timeout, too early, too many requests, busy: caused by the server's state, not by the request."""
NO_ROUTE: Final = frozenset({404, 405})
"""The server is none of the expected program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpDialect:
    """How a serving program responds."""

    program: str
    """Its name, such as SGLang."""
    generate: str
    """Path that generates. A refusal there is the request's fault, and it is never sent twice."""
    words: frozenset[tuple[str, str]] = frozenset()
    """Method and path of requests whose responses are plain text; all others are JSON."""
    code_header: str | None = None
    """Header with the code of a router's own error."""
    not_passed_on: str | None = None
    """The router's code for a request that did not reach a server."""


class NoResponse(EngineError):
    """No response: it is not known whether the server has processed the request."""


class ConnectionLost(NoResponse):
    """The server closed an open connection without a response: it had been idle for too long when the request arrived, or
    the server has died. A second attempt on a new connection shows which."""


def allow_connections(count: int, engine: str) -> None:
    """Raises this process's limit of open files if `count` connections need it. Raises EngineError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EngineError(
                f"{engine}: {count} requests in flight need {needed} open files, but this machine allows {hard} (ulimit -Hn). "
                "Raise that limit, or lower rollout.concurrency."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def new_pool() -> aiohttp.ClientSession:
    """A pool without a limit of connections: the run limits the requests in flight. Call it in a running event loop."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)


class HttpResponse(NamedTuple):
    content: bytes
    status: int
    code: str | None
    """A router's code, for an error of its own."""


class HttpCall(NamedTuple):
    """A request to generate, as plain data."""

    connection: type[Connection]
    address: str
    token: str | None
    engine: str
    """Name of the engine in errors."""
    body: Mapping[str, Any]
    timeout_s: float
    headers: Mapping[str, str] | None


class Connection:
    """One address. `name` begins every error: `engine 0 (http://127.0.0.1:4711)`. A subclass sets `dialect`."""

    dialect: ClassVar[HttpDialect]

    def __init__(self, pool: aiohttp.ClientSession, address: str, token: str | None, engine: str) -> None:
        self.address = address
        self.token = token
        self.engine = engine
        self.name = f"{engine} ({address})"
        self._pool = pool
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Returns the parsed response. Raises EngineUnavailable if the request reached no server, EngineRefused if a healthy
        server refuses a request to generate, EngineError if there is no response in time, it is not JSON, or its status is
        not 2xx."""
        return await self.ask("POST", path, body, timeout_s=timeout_s, headers=headers)

    def as_call(self, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None) -> HttpCall:
        """A request to generate, for an `HttpCaller`."""
        return HttpCall(
            connection=type(self),
            address=self.address,
            token=self.token,
            engine=self.engine,
            body=body,
            timeout_s=timeout_s,
            headers=headers,
        )

    @classmethod
    def columns(cls, reply: Any) -> Any:
        """The reply of a request to generate, for `Running.take` in another process: without what that does not read, and
        with `TokenRows` for the rows of tokens. An invalid reply stays as it is."""
        return reply

    async def get(self, path: str, *, timeout_s: float) -> Any:
        return await self.ask("GET", path, None, timeout_s=timeout_s)

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Sends the request, and once more after a ConnectionLost. A request to generate is not sent again: the server may
        already know its id."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        sent = self._headers if headers is None else {**self._headers, **headers}
        try:
            response = await self._send(method, path, data, sent, timeout_s)
        except ConnectionLost:
            if path == self.dialect.generate:
                raise
            response = await self._send(method, path, data, sent, timeout_s)
        return self._read(method, path, response)

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> HttpResponse:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._pool.request(
                method, self.address + path, data=data, headers=headers, timeout=timeout
            ) as response:
                header = self.dialect.code_header
                code = None if header is None else response.headers.get(header)
                return HttpResponse(await response.read(), response.status, code)
        except TimeoutError as error:
            raise NoResponse(f"{self.name}: {method} {path} got no response in {timeout_s:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"{self.name}: {method} {path}: no server responds there: {error}.") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            if was_closed(error):
                raise ConnectionLost(f"{self.name}: {method} {path}: the server closed the connection.") from error
            # A pool that was closed under a request raises RuntimeError.
            given = str(error) or type(error).__name__
            raise NoResponse(f"{self.name}: {method} {path} failed: {given}.") from error

    def _read(self, method: str, path: str, response: HttpResponse) -> Any:
        content, status = response.content, response.status
        if status in NO_TOKEN:
            raise EngineError(
                f"{self.name}: {method} {path}: the server refuses the token (status {status}). For external servers, "
                "engine.external_engine_token_file must hold their --api-key."
            )
        if status in UNAVAILABLE or (response.code is not None and response.code == self.dialect.not_passed_on):
            raise EngineUnavailable(f"{self.name}: {method} {path}: status {status}: {shown(content)}")
        if path == self.dialect.generate and 400 <= status < 500 and status not in NO_ROUTE:
            raise EngineRefused(f"{self.name}: it refuses a request (status {status}): {reason_in(content)}")
        if not 200 <= status < 300:
            unknown = (
                f" (so it is no {self.dialect.program} server of a version that slime knows)"
                if status in NO_ROUTE
                else ""
            )
            raise EngineError(f"{self.name}: {method} {path}: status {status}{unknown}: {shown(content)}")
        if not content.strip():
            return None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            if (method, path) in self.dialect.words:
                return content.decode(errors="replace")
            raise EngineError(f"{self.name}: {method} {path}: the response is not JSON: {shown(content)}") from error


def was_closed(error: Exception) -> bool:
    """aiohttp wraps a reset in a ClientOSError while it waits for the response."""
    closed = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
    return closed or (isinstance(error, OSError) and error.errno == errno.ECONNRESET)


def reason_in(content: bytes) -> str:
    """The error message in a response, in OpenAI's form; the whole content if it has none."""
    try:
        return shown(str(orjson.loads(content)["error"]["message"]).encode())
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return shown(content)


def shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
