"""LastingStream: standard output or error that a closed terminal, or a pipe whose reader has ended, does not break."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast


class LastingStream:
    """Writes to the stream while it has a reader, then to the null device, with everything else that this process prints."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._while_read(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._while_read(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _while_read(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """A run continues, or saves and ends, when its output has no reader any more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        # What is still buffered is written or lost in the same way.
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
