"""The server around the app."""

from __future__ import annotations

import resource
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from slime_core.controller.gc_control import settled_heap

BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep their idle connections, so that it is they who close them."""
GRACE_S: Final = 10
"""For requests in flight when the router is told to stop."""


def run(app: ASGIApp, listener: socket.socket, *, log_level: str) -> None:
    """Until SIGINT or SIGTERM."""
    # Every request in flight takes two connections.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        access_log=False,
        log_level=log_level,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    # A collection that walks through what was imported, or often through what is in flight, only holds requests up.
    with settled_heap():
        uvicorn.Server(config).run(sockets=[listener])
