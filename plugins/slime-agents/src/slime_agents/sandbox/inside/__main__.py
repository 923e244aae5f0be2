"""The fork server: a line of JSON on standard input asks for a job, a line on standard output answers.

Each job is a fork of this small process, so it starts in a millisecond with everything imported that was preloaded, and leaves
nothing behind: its process is gone, and its folder removed. Standard library alone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import job
import walls

CHUNK = 65536
LOOK_AT_FILES_S = 0.1


class Running:
    """A job on its way."""

    def __init__(
        self, number: int, pid: int, scratch: str, streams: tuple[int, int], ready: int, wall_s: float
    ) -> None:
        self.number = number
        self.pid = pid
        self.scratch = scratch
        self.streams = streams
        self.ready = ready
        self.written: dict[int, bytearray] = {stream: bytearray() for stream in streams}
        self.begun = time.monotonic()
        self.deadline = self.begun + wall_s
        self.cause = ""
        self.is_alive = True

    def end(self, cause: str) -> None:
        """Kills its whole process group."""
        self.cause = self.cause or cause
        if not self.is_alive:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # It has not made its group yet.
            os.kill(self.pid, signal.SIGKILL)


class Server:
    def __init__(self, settings: dict[str, Any], answers: int) -> None:
        self._settings = settings
        self._answers = answers
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: dict[int, Running] = {}
        self._selector = selectors.DefaultSelector()
        self._asked = bytearray()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._selector.register(0, selectors.EVENT_READ, self._read_requests)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakes)
        self._terms = job.Terms(
            cpu_s=settings["cpu_s"],
            memory_bytes=settings["memory_bytes"],
            file_bytes=settings["file_bytes"],
            readable=tuple(settings["readable"]),
            walls=frozenset({"network", "processes", "files"}),
        )
        self._looked_at_files = 0.0

    def serve(self) -> None:
        self._terms = job.Terms(**{**vars(self._terms), "walls": self._standing()})
        self._say({"walls": sorted(self._terms.walls)})
        while True:
            self._start_waiting()
            timeout = None
            if self._running:
                soonest = min(running.deadline for running in self._running.values())
                timeout = max(0.0, min(LOOK_AT_FILES_S, soonest - time.monotonic()))
            for key, _ in self._selector.select(timeout):
                key.data(key.fd)
            self._check_limits()
            self._reap()

    # ---------------------------------------------------------------- what holds

    def _standing(self) -> frozenset[str]:
        """The walls that were tried and hold on this machine."""
        outside = os.path.join(self._settings["scratch"], "outside")
        with open(outside, "w") as file:
            file.write("x")
        attempts: dict[str, tuple[Callable[[str], None], Callable[[], Any]]] = {
            "files": (
                lambda inside: walls.only_files(self._terms.readable, [inside]),
                lambda: os.open(outside, os.O_RDONLY),
            ),
            "network": (lambda inside: walls.refuse_calls(), socket.socket),
            "processes": (lambda inside: walls.refuse_calls(), os.fork),
        }
        held = {wall for wall, (raise_wall, attempt) in attempts.items() if self._holds(raise_wall, attempt)}
        os.unlink(outside)
        return frozenset(held)

    def _holds(self, raise_wall: Callable[[str], None], attempt: Callable[[], Any]) -> bool:
        inside = os.path.join(self._settings["scratch"], "inside")
        os.makedirs(inside, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            held = False
            try:
                raise_wall(inside)
                held = job.standing(attempt)
            finally:
                os._exit(0 if held else 1)
        return os.waitpid(pid, 0)[1] == 0

    # ---------------------------------------------------------------- jobs

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._settings["workers"]:
            request = self._waiting.popleft()
            try:
                self._start(request)
            except OSError as error:
                self._say({"id": request["id"], "cause": "infra", "told": f"a job could not be started: {error}"})

    def _start(self, request: dict[str, Any]) -> None:
        scratch = os.path.join(self._settings["scratch"], str(request["id"]))
        os.mkdir(scratch, 0o700)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        ready_read, ready_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                job.run_code(request["code"], scratch, self._terms, (out_write, err_write), ready_write)
            finally:
                # Only a limit or wall that could not be set leads here.
                os._exit(70)
        for end in (out_write, err_write, ready_write):
            os.close(end)
        running = Running(request["id"], pid, scratch, (out_read, err_read), ready_read, self._settings["wall_s"])
        self._running[pid] = running
        for stream in running.streams:
            os.set_blocking(stream, False)
            self._selector.register(stream, selectors.EVENT_READ, lambda fd, of=running: self._read_output(of, fd))

    def _read_output(self, running: Running, stream: int) -> None:
        while True:
            try:
                data = os.read(stream, CHUNK)
            except BlockingIOError:
                return
            if not data:
                if stream in self._selector.get_map():
                    self._selector.unregister(stream)
                return
            kept = running.written[stream]
            room = self._settings["output_bytes"] - len(kept)
            kept += data[:room]
            if len(data) > room:
                running.end("output")
                return

    def _check_limits(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            if now >= running.deadline:
                running.end("wall")
        if now - self._looked_at_files >= LOOK_AT_FILES_S:
            self._looked_at_files = now
            for running in self._running.values():
                if not holds_less(running.scratch, self._settings["file_bytes"]):
                    running.end("files")

    def _reap(self) -> None:
        while self._running:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                self._finish(self._running.pop(pid), status, used)

    def _finish(self, running: Running, status: int, used: resource.struct_rusage) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGKILL)
        running.is_alive = False
        for stream in running.streams:
            self._read_output(running, stream)
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
            os.close(stream)
        is_ready = os.read(running.ready, 1) == b"r"
        os.close(running.ready)
        remove(running.scratch)
        out, err = (bytes(running.written[stream]).decode(errors="replace") for stream in running.streams)
        if not is_ready and not running.cause:
            running.cause = "infra"
        self._say(
            {
                "id": running.number,
                "cause": running.cause,
                "told": "a limit or a wall could not be set" if running.cause == "infra" else "",
                "out": out,
                "err": err,
                "status": os.waitstatus_to_exitcode(status),
                "cpu_s": used.ru_utime + used.ru_stime,
                "seconds": time.monotonic() - running.begun,
            }
        )

    # ---------------------------------------------------------------- the one who asks

    def _read_requests(self, fd: int) -> None:
        data = os.read(fd, CHUNK)
        if not data:
            # Whoever asked is gone.
            for running in self._running.values():
                running.end("gone")
            os._exit(0)
        self._asked += data
        while (end := self._asked.find(b"\n")) >= 0:
            request = json.loads(self._asked[:end])
            del self._asked[: end + 1]
            if "code" in request:
                self._waiting.append(request)
            else:
                self._cancel(request["cancel"])

    def _cancel(self, number: int) -> None:
        self._waiting = deque(request for request in self._waiting if request["id"] != number)
        for running in self._running.values():
            if running.number == number:
                running.end("cancelled")

    def _drain_wakes(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(fd, CHUNK):
                pass

    def _say(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]


def holds_less(folder: str, most: int) -> bool:
    """Whether the files in it take fewer bytes on disk."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
            if total > most:
                return False
    return True


def remove(folder: str) -> None:
    """Also what its owner has locked."""

    def unlock(function: Callable[..., Any], path: str, error: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            function(path)

    shutil.rmtree(folder, onerror=unlock)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path[:] = [*sys.path[1:], *settings["packages"]]
    for name in settings["preload"]:
        importlib.import_module(name)
    answers = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    Server(settings, answers).serve()


main()
