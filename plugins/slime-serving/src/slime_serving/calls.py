"""Calls to a server that are made in another process than the engine's: where a request comes from."""

from __future__ import annotations

from typing import Any

import aiohttp

from slime_core.contracts.engine import EngineCaller
from slime_serving.connection import HttpCall, allow_connections, new_pool


class HttpCaller(EngineCaller):
    """Has a connection pool of its own. Responses are returned by `Connection.columns`."""

    def __init__(self, *, max_calls: int) -> None:
        self._max_calls = max_calls
        self._pool: aiohttp.ClientSession | None = None

    async def call(self, asked: HttpCall) -> Any:
        """Raises like `Connection.post`."""
        if self._pool is None:
            allow_connections(self._max_calls, asked.engine)
            self._pool = new_pool()
        server = asked.connection(self._pool, asked.address, asked.token, asked.engine)
        reply = await server.post(server.dialect.generate, asked.body, timeout_s=asked.timeout_s, headers=asked.headers)
        return server.columns(reply)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
