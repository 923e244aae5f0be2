"""BearerAuth: refuses requests without the token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[Any], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN: Final = frozenset({"/health"})


class BearerAuth:
    """ASGI middleware around a whole app. /health needs no token, so that health probes work."""

    def __init__(self, app: AsgiApp, token: str | None, *, refusal: Callable[[str], AsgiApp]) -> None:
        """`token`: None serves all callers. `refusal`: returns the response with status 401 for a given reason."""
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._refusal = refusal

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if self._expected is not None and scope["type"] == "http" and scope["path"] not in OPEN:
            provided = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(provided, self._expected):
                given = "a wrong token" if provided else "no token"
                refusal = self._refusal(f"{given}. Send the header `authorization: Bearer TOKEN`")
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
