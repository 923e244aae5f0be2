"""ServerProcess: one program in a process group of its own, which dies with this process at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from slime_core.errors import EngineError
from slime_serving.process_group import end_group

STAMP: Final = re.compile(r"^\[[^\]]*\] ")
"""What SGLang's loggers begin a line with."""
FATAL: Final = "hit an exception: "
"""The process that says so has the others killed."""
TRACEBACK: Final = "Traceback (most recent call last):"
SHOWN: Final = 300
"""Characters of a line."""
LAST_LINES: Final = 25
"""Of the log, shown when a server dies."""
END_S: Final = 30.0
"""For processes that were killed: a driver may take seconds to give the memory of a device back."""
TAKEN: Final = ("address already in use", "errno 98", "is already in use", "not available at")
"""What a log says where somebody else had the port first."""


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address `host` that nobody listens on now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def errors_in(lines: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """The line that ends each traceback, and whether it is one that ends the server."""
    fatal: bool | None = None
    for line in lines:
        text = STAMP.sub("", line)
        if text.endswith(TRACEBACK):
            fatal = FATAL in text
        elif fatal is not None and text and not text[0].isspace():
            yield fatal, text[:SHOWN]
            fatal = None


class ServerProcess:
    """`arguments` stand on its command line. Its options go to stdin, as one line of JSON; its output to `log`, which only the
    user may read: SGLang writes its options there, the token among them."""

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        *,
        log: Path,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
    ) -> None:
        self.log = log
        self._ending = threading.Lock()
        self._ended = False
        """From then on its number may be another process's."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start = log.stat().st_size if log.exists() else 0
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                env=dict(environment),
            )
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        # A program that has died already is noticed by whoever waits for its answer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dict(options)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, for a sentence."""
        code = self.exit_code
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def own_error(self) -> str | None:
        """What SGLang says that it ends of. One of its processes reports a traceback and has all of them killed, so that the
        signal says nothing; else it is the last traceback of a program that has ended by itself."""
        errors = list(errors_in(self._lines()))
        fatal = [error for hit, error in errors if hit]
        if fatal:
            return fatal[0]
        ended_itself = self.exit_code not in (None, 0, -signal.SIGKILL)
        return errors[-1][1] if errors and ended_itself else None

    def _lines(self) -> list[str]:
        """Of this process: a log goes on where that of an attempt before ended. None of a log that cannot be read: that a
        process has ended is told all the same."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._start)
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    @property
    def why(self) -> str:
        """Its ending, behind what it says of it itself."""
        error = self.own_error
        return self.ending if error is None else f"failed: {error} (it {self.ending})"

    def last_lines(self) -> str:
        lines = self._lines()
        return "\n".join(f"  {line[:SHOWN]}" for line in lines[-LAST_LINES:])

    @property
    def found_its_port_taken(self) -> bool:
        said = self.last_lines().lower()
        return any(text in said for text in TAKEN)

    async def stop(self) -> None:
        """The end of the whole group, at once: on SIGTERM SGLang drains, and then waits to collect diagnostics. Returns when
        all that it started has ended, and holds no memory and no port any more; EngineError if that takes longer than
        `END_S`. Stopping twice does nothing."""
        # Where whoever waits is cancelled, the thread goes on to the end.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._ending:
            if self._ended:
                return
            left = end_group(self._process.pid, END_S)
            if left:
                told = ", ".join(f"{process.pid}" for process in left)
                raise EngineError(
                    f"process group {self._process.pid} was killed, and has not ended within {END_S:g} s: {told}. What "
                    "they hold, memory of their devices among it, is not free."
                )
            self._process.wait()
            self._ended = True
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
