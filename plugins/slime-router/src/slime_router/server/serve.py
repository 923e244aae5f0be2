"""Listening, and the server around the app."""

from __future__ import annotations

import gc
import resource
import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from slime_core.errors import ConfigError

BACKLOG: Final = 4096
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep their idle connections, so that it is they who close them."""
GRACE_S: Final = 10
"""For requests in flight when the router is told to stop."""


def listen(host: str, port: int) -> socket.socket:
    """ConfigError if the port is taken or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}. --port 0 takes any free port."
        ) from None
    listener.listen(BACKLOG)
    listener.set_inheritable(False)
    return listener


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
    # What was imported stays; a collection that walks through it would only hold requests up.
    gc.collect()
    gc.freeze()
    uvicorn.Server(config).run(sockets=[listener])
