"""Connection: JSON over HTTP to one server, with its token, over the engine's pool of connections."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import aiohttp
import orjson

from slime_core.errors import EngineError, EngineRefused, EngineUnavailable

IDLE_S: Final = 3.0
"""A connection that was idle for longer is not used again: an external server closes it after five seconds."""
OTHER_FILES: Final = 1024
"""Open files that are no connections."""
SHOWN: Final = 400
"""Characters of an unexpected answer."""
GENERATE: Final = "/generate"
NO_TOKEN: Final = frozenset({401, 403})
UNAVAILABLE: Final = frozenset({408, 425, 429, 503})
"""Too slow, too early, too many, busy: of the server's state, not of what it was asked."""
NO_ROUTE: Final = frozenset({404, 405})
"""Whoever answers is no SGLang server."""
WORDS: Final = frozenset({("GET", "/health"), ("POST", "/flush_cache"), ("POST", "/freeze_gc")})
"""What is answered in words; all else in JSON."""
NOT_PASSED_ON: Final = "call_upstream_request_error"
"""sglang-router's word, in `x-smg-error-code`, for a request that did not reach a server."""


class NoAnswer(EngineError):
    """What the server makes of the request is not known."""


class ConnectionLost(NoAnswer):
    """The server closed a connection that stood open, and has answered nothing on it: it had been idle for too long when
    the request arrived, or the server is gone. Asked once more, on a new connection, it is clear which."""


def allow_connections(count: int, engine: str) -> None:
    """Raises this process's bound on open files where `count` connections need it. EngineError if it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EngineError(
                f"{engine}: {count} requests in flight need {needed} open files, and this machine allows {hard} (ulimit -Hn). "
                "Raise that, or lower rollout.concurrency."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def new_pool() -> aiohttp.ClientSession:
    """As many connections as there are requests in flight; the run bounds those. Call it in a running event loop."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)


class Answer(NamedTuple):
    content: bytes
    status: int
    code: str | None
    """Of sglang-router, where it has an error of its own."""


class Connection:
    """One address. `name` begins every error: `engine 0 (http://127.0.0.1:4711)`."""

    def __init__(self, pool: aiohttp.ClientSession, address: str, token: str | None, engine: str) -> None:
        self.address = address
        self.token = token
        self.name = f"{engine} ({address})"
        self._pool = pool
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Any:
        """The answer. EngineUnavailable if the request has reached nobody; EngineRefused for a request to generate that the
        server, which is well, does not take; EngineError if there is no answer in time, it is no JSON, or its status is
        not 2xx."""
        return await self.ask("POST", path, body, timeout_s=timeout_s, headers=headers)

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
        """Once more after a ConnectionLost, but for /generate: that has an id, which the server may know already."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        sent = self._headers if headers is None else {**self._headers, **headers}
        try:
            answer = await self._send(method, path, data, sent, timeout_s)
        except ConnectionLost:
            if path == GENERATE:
                raise
            answer = await self._send(method, path, data, sent, timeout_s)
        return self._read(method, path, answer)

    async def _send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Answer:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._pool.request(
                method, self.address + path, data=data, headers=headers, timeout=timeout
            ) as answer:
                return Answer(await answer.read(), answer.status, answer.headers.get("x-smg-error-code"))
        except TimeoutError as error:
            raise NoAnswer(f"{self.name}: {method} {path} has not been answered in {timeout_s:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable(f"{self.name}: {method} {path}: nobody answers there: {error}.") from error
        except (aiohttp.ServerDisconnectedError, ConnectionResetError) as error:
            raise ConnectionLost(f"{self.name}: {method} {path}: the server closed the connection.") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # A pool that was closed under a request raises RuntimeError.
            said = str(error) or type(error).__name__
            raise NoAnswer(f"{self.name}: {method} {path} failed: {said}.") from error

    def _read(self, method: str, path: str, answer: Answer) -> Any:
        content, status = answer.content, answer.status
        if status in NO_TOKEN:
            raise EngineError(
                f"{self.name}: {method} {path}: the server refuses the token (status {status}). For external servers, "
                "engine.external_engine_token_file must hold their --api-key."
            )
        if status in UNAVAILABLE or answer.code == NOT_PASSED_ON:
            raise EngineUnavailable(f"{self.name}: {method} {path}: status {status}: {shown(content)}")
        if path == GENERATE and 400 <= status < 500 and status not in NO_ROUTE:
            raise EngineRefused(f"{self.name}: it refuses a request (status {status}): {reason_in(content)}")
        if not 200 <= status < 300:
            stranger = " (so it is no SGLang server of a version that slime knows)" if status in NO_ROUTE else ""
            raise EngineError(f"{self.name}: {method} {path}: status {status}{stranger}: {shown(content)}")
        if not content.strip():
            return None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            if (method, path) in WORDS:
                return content.decode(errors="replace")
            raise EngineError(f"{self.name}: {method} {path} answers with what is no JSON: {shown(content)}") from error


def reason_in(content: bytes) -> str:
    """SGLang's sentence, where the answer is its record of an error."""
    try:
        return shown(str(orjson.loads(content)["error"]["message"]).encode())
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return shown(content)


def shown(content: bytes) -> str:
    text = " ".join(content.decode(errors="replace").split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
