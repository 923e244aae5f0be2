"""The server around the app."""

from __future__ import annotations

from typing import Final

import uvicorn
from starlette.types import ASGIApp

BACKLOG: Final = 1024
KEEP_ALIVE_S: Final = 75


def server_of(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(app, access_log=False, log_level="warning", timeout_keep_alive=KEEP_ALIVE_S, lifespan="off")
    return uvicorn.Server(config)
