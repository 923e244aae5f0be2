"""One job, in the process that was forked for it: limits, walls, then the code. It never returns."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import isolation

FILE = "<code>"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Limits and walls of a job."""

    cpu_s: int
    memory_bytes: int
    file_bytes: int
    readable: tuple[str, ...]
    walls: Collection[str]
    """Walls to set: `network`, `processes`, `files`."""


def run_code(code: str, scratch: str, terms: Terms, streams: tuple[int, int], ready: int) -> None:
    """Sets the limits and walls, writes a byte to `ready`, and runs the code with `streams` as its output."""
    enclose(scratch, terms, streams, ready)
    os.write(ready, b"r")
    os.close(ready)
    status = 1
    try:
        exec(compile(code, FILE, "exec"), {"__name__": "__main__", "__builtins__": __builtins__})  # noqa: S102
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # whatever the code raises is its own result
        show(error)
    finish(status)


def finish(status: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        status = status or 1
    os._exit(status & 0xFF)


def show(error: BaseException) -> None:
    """Prints the traceback, from the first line of the code."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    try:
        traceback.print_exception(type(error), error, trace, limit=20)
    except BaseException:  # an exception's own code may do anything
        os.write(2, b"an error that cannot be shown\n")


def enclose(scratch: str, terms: Terms, streams: tuple[int, int], ready: int) -> None:
    os.setsid()
    isolation.end_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number, stream in enumerate((nothing, *streams)):
        os.dup2(stream, number)
    os.closerange(3, ready)
    os.closerange(ready + 1, 4096)
    os.environ.clear()
    os.environ.update(HOME=scratch, TMPDIR=scratch, PATH="/usr/bin:/bin", LANG="C.UTF-8")
    os.chdir(scratch)
    os.umask(0o077)
    limit(resource.RLIMIT_CPU, terms.cpu_s, terms.cpu_s + 1)
    limit(resource.RLIMIT_AS, terms.memory_bytes)
    limit(resource.RLIMIT_FSIZE, terms.file_bytes)
    limit(resource.RLIMIT_NOFILE, 64)
    limit(resource.RLIMIT_CORE, 0)
    if "processes" not in terms.walls:
        # Counts all of the user's processes, so there is room for none; without effect for root.
        limit(resource.RLIMIT_NPROC, 0)
    if sys.platform == "linux" and os.geteuid() == 0:
        isolation.drop_capabilities()
    if "files" in terms.walls:
        isolation.only_files(terms.readable, [scratch, os.devnull])
    if "network" in terms.walls:
        isolation.refuse_calls()


def limit(what: int, soft: int, hard: int | None = None) -> None:
    resource.setrlimit(what, (soft, soft if hard is None else hard))


def is_refused(attempt: Callable[[], Any]) -> bool:
    """Whether `attempt`, which a wall must prevent, fails."""
    try:
        attempt()
    except OSError:
        return True
    return False
