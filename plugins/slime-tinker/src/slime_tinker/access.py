"""Access: an ASGI middleware that finds the tenant of a key, and keeps bodies within their limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import zstandard
from starlette.responses import Response

from slime_core.errors import SlimeError
from slime_tinker.json_response import refused
from slime_tinker.keys import PREFIX, Keys
from slime_tinker.notes import note

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN: Final = frozenset({"/api/v1/healthz"})
EVERYONE: Final = "everyone"
"""The tenant of all callers of a server without keys."""
CHUNK: Final = 2**20


class Access:
    def __init__(
        self, app: AsgiApp, keys: Callable[[], Keys] | None, *, max_body_bytes: int, max_held_bytes: int
    ) -> None:
        """`keys`: those that are valid now; None: every caller is served. `max_held_bytes`: in bodies of a tenant's
        requests that are being received or handled."""
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            tenant = EVERYONE if self._keys is None or scope["path"] in OPEN else self._tenant(headers, self._keys())
        except SlimeError as error:
            note(str(error))
            await refused(503, "the server's keys cannot be read at the moment.")(scope, receive, send)
            return
        if tenant is None:
            refusal = refused(401, "no valid key. Set TINKER_API_KEY to one that slime serve keys add gave you.")
            await refusal(scope, receive, send)
            return
        scope["tenant"] = tenant
        held = Held(self._held, tenant, self._max_held_bytes)
        try:
            body = await self._body(headers, receive, held)
            if body is None:
                return
            if isinstance(body, Response):
                await body(scope, receive, send)
                return
            await self._app(scope, received(body, receive), send)
        finally:
            held.free()

    def _tenant(self, headers: dict[bytes, bytes], keys: Keys) -> str | None:
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        text = given.decode("latin-1")
        return keys.tenant_of(text) if text.startswith(PREFIX) else None

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, held: Held) -> bytes | Response | None:
        """Decompressed; or why it is refused. None: the client has gone, and what came may be a part."""
        parts, size, most = [], 0, self._max_body_bytes
        too_large = refused(
            413, f"the body has more than {most} bytes. Send fewer datums at a time: gradients add up until optim_step."
        )
        too_many = refused(429, f"your requests that are being received have {self._max_held_bytes} bytes or more.")
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > most:
                return too_large
            if not held.add(len(parts[-1])):
                return too_many
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
            return refused(413, f"the body is no zstd: {error}.")
        held.add(len(inflated))
        return bytes(inflated)


class Held:
    """Bytes of one request, counted with the tenant's others."""

    def __init__(self, of_tenants: Counter[str], tenant: str, most: int) -> None:
        self._of_tenants = of_tenants
        self._tenant = tenant
        self._most = most
        self._own = 0

    def add(self, size: int) -> bool:
        """False if the tenant's others have the most there may be."""
        others = self._of_tenants[self._tenant] - self._own
        self._own += size
        self._of_tenants[self._tenant] += size
        return others < self._most

    def free(self) -> None:
        self._of_tenants[self._tenant] -= self._own
        if not self._of_tenants[self._tenant]:
            del self._of_tenants[self._tenant]


def received(body: bytes, receive: Receive) -> Receive:
    """`body`, and then what else comes."""
    sent = False

    async def whole() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return whole
