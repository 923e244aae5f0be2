"""Gate: only who brings the token comes in."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from slime_router.server.json_answer import json_error

OPEN = frozenset({"/health"})


class Gate:
    """Around the whole app; /health is open, for who asks whether anything is there."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._expected is not None and scope["type"] == "http" and scope["path"] not in OPEN:
            brought = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(brought, self._expected):
                said = "a wrong token" if brought else "no token"
                wanted = f"{said}; the header `authorization: Bearer TOKEN` is wanted"
                await json_error(401, wanted, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)
