"""Gate: only who brings the token comes in."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN: Final = frozenset({"/health"})


class Gate:
    """Around a whole ASGI app; /health is open, for who asks whether anything is there."""

    def __init__(self, app: AsgiApp, token: str | None, *, refusal: Callable[[str], AsgiApp]) -> None:
        """`token` None lets everybody in. `refusal`: the answer with status 401, from what is wrong."""
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._refusal = refusal

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if self._expected is not None and scope["type"] == "http" and scope["path"] not in OPEN:
            brought = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(brought, self._expected):
                said = "a wrong token" if brought else "no token"
                refusal = self._refusal(f"{said}; the header `authorization: Bearer TOKEN` is wanted")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
