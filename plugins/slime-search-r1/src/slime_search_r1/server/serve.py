"""Listening, and the server around the app."""

from __future__ import annotations

import socket
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from slime_core.errors import ConfigError

BACKLOG: Final = 1024
KEEP_ALIVE_S: Final = 75


def listen(host: str, port: int) -> socket.socket:
    """ConfigError if the port is taken or the address is not this machine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {error.strerror}. --port 0 takes any free port."
        ) from None
    listener.listen(BACKLOG)
    return listener


def server_of(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(app, access_log=False, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, lifespan="off")
    return uvicorn.Server(config)
