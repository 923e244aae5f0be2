"""ServerProcess: one program in its own process group, which ends with this process at the latest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from slime_core.errors import EngineError
from slime_serving.process_group import kill_process_group

TRACEBACK: Final = "Traceback (most recent call last):"
SHOWN: Final = 300
"""Characters of a line."""
LAST_LINES: Final = 25
"""Lines of the log that are shown when a server dies."""
END_S: Final = 30.0
"""Time limit for killed processes: a driver may take seconds to free the memory of a device."""
TAKEN: Final = ("address already in use", "errno 98", "is already in use", "not available at")
"""Texts in a log when another process uses the port."""
CANNOT_LISTEN: Final = "error while attempting to bind on address"
"""asyncio's text, which uvicorn logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """How a serving program logs."""

    stamp: re.Pattern[str]
    """Beginning of its loggers' lines."""
    fatal: str
    """A process of it that logs a traceback with this text kills the others."""
    clock: str = ""
    """Format of the time in `imported`."""
    imported: re.Pattern[str] | None = None
    """A line with its time, when everything is imported and devices are used."""
    seconds: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """Parts of its start, in their order: a line of the first rank with seconds; several lines add up."""
    causes: Mapping[re.Pattern[str], str] = field(default_factory=dict)
    """Lines that are no tracebacks and report why it fails, with an error that names what to change."""


def address_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def errors_in(lines: Sequence[str], form: LogFormat) -> Iterator[tuple[bool, str]]:
    """Yields, for each traceback, whether it ends the server, and its last line."""
    fatal: bool | None = None
    for line in lines:
        text = form.stamp.sub("", line)
        if text.endswith(TRACEBACK):
            fatal = form.fatal in text
        elif fatal is not None and text and not text[0].isspace():
            yield fatal, text[:SHOWN]
            fatal = None


def start_seconds(lines: Sequence[str], form: LogFormat, began: float, opened: float | None = None) -> dict[str, float]:
    """Seconds of the parts of a start, as far as the log has them. `began`: when the process was started, since the epoch.
    `opened`: when its gate was opened; the wait after its imports is its `connect`, unless the log has that."""
    found: dict[str, float] = {}
    for line in lines:
        if form.imported is not None and "imports" not in found and (at := form.imported.match(line)):
            found["imports"] = seconds_until(at[1], form.clock, began)
        for part, pattern in form.seconds.items():
            if at := pattern.search(line):
                found[part] = found.get(part, 0.0) + float(at[1])
    if opened is not None and "imports" in found:
        found.setdefault("connect", max(opened - began - found["imports"], 0.0))
    return {part: found[part] for part in dict.fromkeys(("imports", "connect", *form.seconds)) if part in found}


def seconds_until(text: str, clock: str, began: float) -> float:
    """`text`: a time that is written as `clock`, perhaps without its year: then it is the first such one after `began`."""
    if "%Y" in clock:
        return max(datetime.strptime(text, clock).timestamp() - began, 0.0)
    # A year that has a 29 February, which strptime's own has not.
    year = datetime.fromtimestamp(began).year
    found = []
    for each in (year, year + 1):
        with contextlib.suppress(ValueError):
            found.append(datetime.strptime(f"{each} {text}", f"%Y {clock}").timestamp() - began)
    # A second earlier: the log has no fractions.
    return max(next((seconds for seconds in found if seconds > -1.0), 0.0), 0.0)


class ServerProcess:
    """Starts `module` with `arguments` on the command line of `python`. `options` are sent to stdin, as one line of JSON. Its
    output goes to `log`, which only the user can read: servers write their options there, including the token."""

    def __init__(
        self,
        module: str,
        options: Mapping[str, Any],
        *,
        log: Path,
        form: LogFormat,
        environment: Mapping[str, str],
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        gate: Path | None = None,
    ) -> None:
        """`gate`: a file that the program waits for; `open_gate` makes it."""
        self.log = log
        self._form = form
        self._gate = gate
        self._opened: float | None = None
        self._began = time.time()
        self._ending = threading.Lock()
        self._ended = False
        """Set when it has ended: from then on its pid may belong to another process."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._start = log.stat().st_size if log.exists() else 0
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
                env=dict(environment),
            )
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        # If the program has died already, the caller notices when it waits for a response.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(dict(options)).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open_gate(self) -> None:
        if self._gate is not None:
            self._gate.touch()
            self._opened = time.time()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        code = self.exit_code
        if code is None:
            return "runs"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    @property
    def own_error(self) -> str | None:
        """The error that it logged before its end. If one of its processes logs a traceback and kills all of them, the
        signal has no meaning, and this is that error; else the last traceback of a program that ended by itself."""
        if (cause := self.known_cause) is not None:
            return cause
        errors = list(errors_in(self._lines(), self._form))
        fatal = [error for hit, error in errors if hit]
        if fatal:
            return fatal[0]
        ended_itself = self.exit_code not in (None, 0, -signal.SIGKILL)
        return errors[-1][1] if errors and ended_itself else None

    @property
    def known_cause(self) -> str | None:
        """Why it fails, if one of the log's lines is known; it may run on."""
        found = (text for line in self._lines() for known, text in self._form.causes.items() if known.search(line))
        return next(found, None)

    def _lines(self) -> list[str]:
        """Lines of this process: the log also has those of attempts before it. [] if the log cannot be read: the end of the
        process is reported anyway."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._start)
                return file.read().decode(errors="replace").splitlines()
        except OSError:
            return []

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Parts of its start; see `start_seconds`."""
        return start_seconds(self._lines(), self._form, self._began, self._opened)

    @property
    def why(self) -> str:
        """How it ended, with the error that it logged."""
        error = self.own_error
        return self.ending if error is None else f"failed: {error} (it {self.ending})"

    def last_lines(self) -> str:
        lines = self._lines()
        return "\n".join(f"  {line[:SHOWN]}" for line in lines[-LAST_LINES:])

    @property
    def found_its_port_taken(self) -> bool:
        given = self.last_lines().lower()
        return any(text in given for text in TAKEN)

    @property
    def cannot_listen(self) -> bool:
        """Whether it has logged that it cannot listen. SGLang then runs on without a port."""
        return any(CANNOT_LISTEN in line for line in self._lines())

    async def stop(self) -> None:
        """Kills the whole process group: on SIGTERM servers drain, and some then wait to collect diagnostics. Returns when all
        its processes have ended and their memory and ports are free. Raises EngineError if that takes longer than `END_S`.
        A second call does nothing."""
        # If the caller is cancelled, the thread continues to the end.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._ending:
            if self._ended:
                return
            left = kill_process_group(self._process.pid, END_S)
            if left:
                pids = ", ".join(f"{process.pid}" for process in left)
                raise EngineError(
                    f"process group {self._process.pid} was killed, but has not ended within {END_S:g} s: {pids}. Its "
                    "resources, including device memory, are not free."
                )
            self._process.wait()
            self._ended = True
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
