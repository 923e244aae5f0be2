"""InLoopServer: a server in the event loop of a run. Modules that import this depend on uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn


class _WithoutSignals(uvicorn.Server):
    """Leaves the process's signals to the run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class InLoopServer:
    """Call `start` once. `close` ends it at once, even with open connections."""

    def __init__(self, app: Any) -> None:
        """`app`: an ASGI app without a lifespan."""
        self._server = _WithoutSignals(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False))
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Returns when the server accepts requests on `listener`."""
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.002)

    async def close(self) -> None:
        if self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
            self._task = None
