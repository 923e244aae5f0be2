"""Access: an ASGI middleware that finds the tenant of a key, and keeps bodies within their limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import zstandard

from slime_tinker.json_response import refused
from slime_tinker.keys import PREFIX, Keys

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN: Final = frozenset({"/api/v1/healthz"})
EVERYONE: Final = "everyone"
"""The tenant of all callers of a server without keys."""
CHUNK: Final = 2**20


class Access:
    def __init__(self, app: AsgiApp, keys: Callable[[], Keys] | None, *, max_body_bytes: int) -> None:
        """`keys`: those that are valid now; None: every caller is served."""
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        tenant = EVERYONE if self._keys is None or scope["path"] in OPEN else self._tenant(headers, self._keys())
        if tenant is None:
            refusal = refused(401, "no valid key. Set TINKER_API_KEY to one that slime serve keys add gave you.")
            await refusal(scope, receive, send)
            return
        scope["tenant"] = tenant
        body = await self._body(headers, receive)
        if body is None:
            return
        if isinstance(body, str):
            await refused(413, body)(scope, receive, send)
            return
        sent = False

        async def whole() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, whole, send)

    def _tenant(self, headers: dict[bytes, bytes], keys: Keys) -> str | None:
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        text = given.decode("latin-1")
        return keys.tenant_of(text) if text.startswith(PREFIX) else None

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | str | None:
        """Decompressed; as text why it is refused. None: the client has gone, and what came may be a part."""
        parts, size, most = [], 0, self._max_body_bytes
        too_large = (
            f"the body has more than {most} bytes. Send fewer datums at a time: gradients add up until optim_step."
        )
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                return too_large
            more = message.get("more_body", False)
        body = b"".join(parts)
        if headers.get(b"content-encoding") != b"zstd":
            return body
        inflated = bytearray()
        reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(body, read_across_frames=True)
        try:
            while chunk := reader.read(CHUNK):
                inflated += chunk
                if len(inflated) > most:
                    return too_large
        except zstandard.ZstdError as error:
            return f"the body is no zstd: {error}."
        return bytes(inflated)
