"""The fork server: a line of JSON on standard input requests a job, a line on standard output is its result.

Each job is a fork of this small process. It starts in about a millisecond with the preloaded modules imported. Afterwards its
process is killed and its folder removed. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import isolation
import job
import scratch

CHUNK = 65536
UNWATCHED_S = 0.1
"""Most jobs end before this time, and their files need not be watched."""
TOO_MUCH = {scratch.BYTES: "files", scratch.ENTRIES: "entries", scratch.HIDDEN: "hidden"}


class Running:
    """A running job."""

    def __init__(self, number: int, pid: int, folder: str, streams: tuple[int, int], ready: int, wall_s: float) -> None:
        self.number = number
        self.pid = pid
        self.folder = folder
        self.streams = streams
        self.ready = ready
        self.written: dict[int, bytearray] = {stream: bytearray() for stream in streams}
        self.begun = time.monotonic()
        self.deadline = self.begun + wall_s
        self.watcher: int | None = None
        """Process that watches its folder."""
        self.is_watched = False
        """Whether a watcher was started."""
        self.cause = ""
        self.detail = ""
        self.is_alive = True

    @property
    def next_event(self) -> float:
        return self.deadline if self.is_watched else min(self.deadline, self.begun + UNWATCHED_S)

    def end(self, cause: str, detail: str = "") -> None:
        """Kills the process group of the job. The first `cause` is kept."""
        if not self.cause:
            self.cause, self.detail = cause, detail
        if not self.is_alive:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # It has not made its group yet.
            os.kill(self.pid, signal.SIGKILL)


class Server:
    def __init__(self, settings: dict[str, Any], output: int) -> None:
        self._settings = settings
        self._output = output
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: dict[int, Running] = {}
        self._watchers: dict[int, Running] = {}
        self._cleaners: set[int] = set()
        """Processes that remove the files of jobs."""
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

    def serve(self) -> None:
        self._terms = job.Terms(**{**vars(self._terms), "walls": self._working_walls()})
        self._send({"walls": sorted(self._terms.walls)})
        while True:
            self._start_waiting()
            soonest = min((running.next_event for running in self._running.values() if not running.cause), default=None)
            for key, _ in self._selector.select(None if soonest is None else max(0.0, soonest - time.monotonic())):
                key.data(key.fd)
            self._check_limits()
            self._reap()

    # ---------------------------------------------------------------- walls

    def _working_walls(self) -> frozenset[str]:
        """Tests each wall, and returns those that work on this machine."""
        outside = os.path.join(self._settings["scratch"], "outside")
        with open(outside, "w") as file:
            file.write("x")
        attempts: dict[str, tuple[Callable[[str], None], Callable[[], Any]]] = {
            "files": (
                lambda inside: isolation.only_files(self._terms.readable, [inside]),
                lambda: os.open(outside, os.O_RDONLY),
            ),
            "network": (lambda inside: isolation.refuse_calls(), socket.socket),
            "processes": (lambda inside: isolation.refuse_calls(), os.fork),
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
                held = job.is_refused(attempt)
            finally:
                os._exit(0 if held else 1)
        return os.waitpid(pid, 0)[1] == 0

    # ---------------------------------------------------------------- jobs

    def _start_waiting(self) -> None:
        # Removals count too: otherwise jobs could leave files faster than they are removed.
        while self._waiting and len(self._running) + len(self._cleaners) < self._settings["workers"]:
            request = self._waiting.popleft()
            try:
                self._start(request)
            except OSError as error:
                self._send({"id": request["id"], "cause": "infra", "detail": f"a job could not be started: {error}"})

    def _start(self, request: dict[str, Any]) -> None:
        folder = os.path.join(self._settings["scratch"], str(request["id"]))
        os.mkdir(folder, 0o700)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        ready_read, ready_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                job.run_code(request["code"], folder, self._terms, (out_write, err_write), ready_write)
            finally:
                # Reached only if a limit or a wall could not be set.
                os._exit(70)
        for end in (out_write, err_write, ready_write):
            os.close(end)
        running = Running(request["id"], pid, folder, (out_read, err_read), ready_read, self._settings["wall_s"])
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
            elif now >= running.next_event and not running.cause:
                self._watch(running)

    def _watch(self, running: Running) -> None:
        """Watches the folder in a separate process: scanning a full folder may take long."""
        limits = self._settings["file_bytes"], self._settings["max_files"]
        running.is_watched = True
        try:
            running.watcher = self._aside(lambda: scratch.watch(running.folder, *limits))
        except OSError as error:
            running.end("infra", f"its files cannot be watched: {error}")
        else:
            self._watchers[running.watcher] = running

    def _aside(self, work: Callable[[], int]) -> int:
        """Runs `work` in a forked process, whose exit code is its result. Returns the process id."""
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                signal.set_wakeup_fd(-1)
                os.closerange(0, 4096)
                isolation.end_with_parent(signal.SIGKILL)
                status = work()
            finally:
                os._exit(status)
        return pid

    def _reap(self) -> None:
        while self._running or self._watchers or self._cleaners:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._running:
                self._finish(self._running.pop(pid), status, used)
            elif pid in self._watchers:
                watched = self._watchers.pop(pid)
                watched.watcher = None
                if watched.is_alive:
                    watched.end(
                        TOO_MUCH.get(os.waitstatus_to_exitcode(status), "infra"), "its files could not be watched"
                    )
            else:
                self._cleaners.discard(pid)

    def _finish(self, running: Running, status: int, used: resource.struct_rusage) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGKILL)
        running.is_alive = False
        if running.watcher is not None:
            os.kill(running.watcher, signal.SIGKILL)
        for stream in running.streams:
            self._read_output(running, stream)
            if stream in self._selector.get_map():
                self._selector.unregister(stream)
            os.close(stream)
        is_ready = os.read(running.ready, 1) == b"r"
        os.close(running.ready)
        self._remove(running.folder)
        out, err = (bytes(running.written[stream]).decode(errors="replace") for stream in running.streams)
        if not is_ready and not running.cause:
            running.cause, running.detail = "infra", "a limit or a wall could not be set"
        self._send(
            {
                "id": running.number,
                "cause": running.cause,
                "detail": running.detail,
                "out": out,
                "err": err,
                "status": os.waitstatus_to_exitcode(status),
                "cpu_s": used.ru_utime + used.ru_stime,
                "seconds": time.monotonic() - running.begun,
            }
        )

    def _remove(self, folder: str) -> None:
        """Removes a folder, in a separate process if it is not empty."""

        def removed() -> int:
            scratch.remove(folder)
            return 0

        if not scratch.is_removed(folder):
            # If no process can be started, the folder is removed with the server.
            with contextlib.suppress(OSError):
                self._cleaners.add(self._aside(removed))

    # ---------------------------------------------------------------- requests

    def _read_requests(self, fd: int) -> None:
        data = os.read(fd, CHUNK)
        if not data:
            # The client has closed the pipe.
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

    def _send(self, result: dict[str, Any]) -> None:
        data = json.dumps(result).encode() + b"\n"
        while data:
            data = data[os.write(self._output, data) :]


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path[:] = [*sys.path[1:], *settings["packages"]]
    for name in settings["preload"]:
        importlib.import_module(name)
    output = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    sys.dont_write_bytecode = True
    gc.collect()
    gc.freeze()
    Server(settings, output).serve()


main()
