"""Channel: messages over a socket between two processes of one run. Those of one turn of the event loop travel together."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

LENGTH_BYTES: Final = 8
READ_AHEAD: Final = 1 << 22
"""Bytes that wait in this process to be read as messages."""


def packet(messages: Sequence[Any]) -> tuple[bytes, bytes]:
    """Length and content."""
    content = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(LENGTH_BYTES), content


def send_at_once(end: socket.socket, message: Any) -> None:
    """From a thread beside the event loop, to a channel that reads only. Waits until the socket has it."""
    end.sendall(b"".join(packet([message])))


class Channel:
    """Both ends trust each other: one has started the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: list[Any] = []

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        reader, writer = await asyncio.open_connection(sock=end, limit=READ_AHEAD)
        return cls(reader, writer)

    def send(self, message: Any) -> None:
        """Sends at the end of this turn of the loop, in the order of the calls. Does nothing if the other end is gone."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(message)

    def _flush(self) -> None:
        messages, self._waiting = self._waiting, []
        if messages and not self._writer.is_closing():
            for part in packet(messages):
                self._writer.write(part)

    async def read(self, take: Callable[[Any], None]) -> None:
        """Calls `take` with each message. Returns when the other end is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
                for message in pickle.loads(await self._reader.readexactly(length)):  # noqa: S301 - of the same run
                    take(message)

    async def close(self) -> None:
        """Sends what waits, and closes."""
        self._flush()
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
