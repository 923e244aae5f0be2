"""The uvicorn server that runs the app."""

from __future__ import annotations

import resource
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from slime_core.controller.gc_control import frozen_gc

BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that clients close them first."""
GRACE_S: Final = 10
"""Time for requests in flight when the router is stopped."""


def run(app: ASGIApp, listener: socket.socket, *, log_level: str) -> None:
    """Serves until SIGINT or SIGTERM."""
    # Every request in flight uses two connections.
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
    # Garbage collections that scan imported modules, or often the requests in flight, only delay requests.
    with frozen_gc():
        uvicorn.Server(config).run(sockets=[listener])
