"""ServerProcess: one program in a process group of its own, which dies with this process at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LAST_LINES: Final = 25
"""Of the log, shown when a server dies."""
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


class ServerProcess:
    """Its options go to stdin, as one line of JSON; its output to `log`, which only the user may read: SGLang writes
    its options there, the token among them."""

    def __init__(self, module: str, options: Mapping[str, Any], *, log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
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

    def last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line[:300]}" for line in lines[-LAST_LINES:])

    @property
    def found_its_port_taken(self) -> bool:
        said = self.last_lines().lower()
        return any(text in said for text in TAKEN)

    async def stop(self) -> None:
        """The end of the whole group, at once: on SIGTERM SGLang drains, and then waits to collect diagnostics. Stopping
        twice does nothing."""
        self.kill()
        await asyncio.to_thread(self._process.wait)

    def kill(self) -> None:
        # What it started may outlive it.
        self._signal(signal.SIGKILL)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
