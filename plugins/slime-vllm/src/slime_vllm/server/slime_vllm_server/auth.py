"""RequireToken: every route needs the bearer token. vLLM's own --api-key leaves the control routes open to all."""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

VARIABLE = "SLIME_VLLM_TOKEN"
"""Environment variable of the server's process with the token."""
OPEN = frozenset({"/health"})


class RequireToken:
    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b'{"error": "unauthorized"}'})
                return
        await self._app(scope, receive, send)
