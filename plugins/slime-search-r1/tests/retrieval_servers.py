"""Retrieval servers that misbehave, and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from slime_search_r1.document import Document
from slime_search_r1.places import GivenServer
from slime_search_r1.searches import Searches

DOCUMENTS = [
    Document(title="textwrap", text="dedent: Remove any common leading whitespace from every line in `text`."),
    Document(title="json", text="loads: Deserialize a document to a Python object."),
    Document(contents='"os.path"\njoin: Join two or more pathname components.'),
    Document(title="shlex", text="join: Return a shell-escaped string."),
]
TOKEN = "let-me-in"

Reply = Callable[[list[str]], Awaitable[tuple[int, bytes]]]


class Scripted:
    """An HTTP server whose every answer a function makes; it remembers what it was asked."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[list[str]] = []
        self.tokens: list[str | None] = []
        self.handlers: list[asyncio.Task[object]] = []
        self._reply = reply

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self.handlers.append(handler)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                headers = dict(line.split(": ", 1) for line in head[1:] if line)
                self.tokens.append(headers.get("authorization"))
                self.asked.append(json.loads(await reader.readexactly(int(headers["content-length"])))["queries"])
                status, body = await self._reply(self.asked[-1])
                writer.write(f"HTTP/1.1 {status} status\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def scripted(reply: Reply) -> AsyncIterator[tuple[Scripted, str]]:
    playing = Scripted(reply)
    server = await asyncio.start_server(playing.handle, "127.0.0.1", 0)
    try:
        yield playing, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for handler in playing.handlers:
            handler.cancel()
        await asyncio.gather(*playing.handlers, return_exceptions=True)


@contextlib.asynccontextmanager
async def searching(url: str, **options: object) -> AsyncIterator[Searches]:
    known = {"topk": 2, "timeout_s": 5.0, "attempts": 1, "connections": 4, **options}
    searches = Searches(GivenServer(url, TOKEN), **known)  # type: ignore[arg-type]
    try:
        yield searches
    finally:
        await searches.close()
