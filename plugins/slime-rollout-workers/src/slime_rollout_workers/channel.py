"""Channel: messages over a socket between two processes of one run. Those of one turn of the event loop travel together, up
to a few: where hundreds of responses arrive at once, the other end works on the first ones while this one reads the rest."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from slime_core.registry.boundary import foreign, held

LENGTH_BYTES: Final = 8
PACKET_MESSAGES: Final = 16
"""Most messages that wait for the end of a turn."""
READ_AHEAD: Final = 1 << 22
"""Bytes that wait in this process to be read as messages."""


Unsendable: TypeAlias = Callable[[Exception], None]
"""Called if a message cannot be pickled, with the reason, perhaps within `send`. It may send another one, which is read after
those that were sent before."""


class Send(Protocol):
    """`Channel.send`."""

    def __call__(self, message: Any, unsendable: Unsendable | None = None, /) -> None: ...


def packet(messages: Sequence[Any]) -> tuple[bytes, bytes]:
    """Length and content."""
    content = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(LENGTH_BYTES), content


def send_at_once(end: socket.socket, message: Any) -> None:
    """From a thread beside the event loop, to a channel that reads only. Waits until the socket has it."""
    end.sendall(b"".join(packet([message])))


class LastingReader(asyncio.StreamReader):
    """What has arrived is read, also after the other end has died: a reset connection is an end."""

    def set_exception(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionError):
            self.feed_eof()
        else:
            super().set_exception(exc)


class Channel:
    """Both ends trust each other: one has started the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: list[tuple[Any, Unsendable | None]] = []

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        loop = asyncio.get_running_loop()
        reader = LastingReader(limit=READ_AHEAD, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, sock=end)
        return cls(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def send(self, message: Any, unsendable: Unsendable | None = None, /) -> None:
        """Sends at the end of this turn of the loop at the latest, in the order of the calls. Does nothing if the other end is
        gone. What others wait for and has foreign content comes with `unsendable`."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append((message, unsendable))
        if len(self._waiting) == PACKET_MESSAGES:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting or self._writer.is_closing():
            return
        error = self._write([message for message, _ in waiting])
        if error is None:
            return
        for message, unsendable in waiting:
            error = self._write([message])
            if error is not None and unsendable is not None:
                unsendable(error)
            elif error is not None:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"{type(message).__name__} cannot be sent", "exception": error}
                )

    def _write(self, messages: Sequence[Any]) -> Exception | None:
        """Returns why they cannot be pickled."""
        with held() as failed:
            parts = packet(messages)
        if failed.error is None:
            self._writer.write(b"".join(parts))
        return failed.error

    async def read(self, take: Callable[[Any], None]) -> None:
        """Calls `take` with each message. Returns when the other end is gone; raises what `take` raises."""
        while (content := await self._next()) is not None:
            with foreign("a message between a rollout worker and the driver", "unpickle"):
                messages = pickle.loads(content)  # noqa: S301 - of the same run
            for message in messages:
                take(message)
            # What is in the buffer is read without a wait: tasks that the messages woke, and other channels, get their turn.
            await asyncio.sleep(0)

    async def _next(self) -> bytes | None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
            return await self._reader.readexactly(length)
        return None

    async def close(self) -> None:
        """Sends what waits, and closes."""
        while self._waiting:
            self._flush()
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def abort(self) -> None:
        """Closes at once, when nothing reads at the other end. It may be open: children of the process there inherit it."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
