"""RewardProcess: a worker process that builds rewards and scores groups, for threads of the run.

A process that died is replaced at the next call; the call that it died in raises. Each call in progress has its own process, so
no other call is lost with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeVar

from slime_core.registry.plugin_file import PluginFile
from slime_core.rollout.reward_worker import Failure, Scored, Servers, build_reward, score_groups, serve
from slime_core.types.sample import SampleGroup

T = TypeVar("T")
PROCESS_NAME: Final = "slime-rewards"
REBUILD_S: Final = 600.0
"""For a reward that is built in a process that replaces another one; it may load a model."""


class WorkerDied(Exception):
    """The process ended before it responded."""

    def __init__(self, exitcode: int | None) -> None:
        super().__init__(f"exit code {exitcode}")
        self.exitcode = exitcode


class WorkerLate(Exception):
    """There was no response in time; the process was killed."""


class WorkerClosed(Exception):
    """The call was cancelled; the process was killed, or never started."""


class RemoteTraceback(Exception):
    """Traceback of a worker process, set as the cause of the error raised here."""


class RewardProcess:
    """Started by the first call. One call at a time; others wait."""

    def __init__(self, plugin_files: tuple[PluginFile, ...]) -> None:
        self._plugin_files = plugin_files
        self._turn = threading.Lock()
        self._state = threading.Lock()
        """Guards the attributes that `kill` reads."""
        self._process: SpawnProcess | None = None
        self._killed: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._built: set[tuple[str, Servers]] = set()
        self._asked_by: threading.Event | None = None
        self._closed = False

    def build(self, spec: str, servers: Servers) -> None:
        """Builds the reward in the process. Raises the errors of building it, and WorkerDied."""
        with self._turn:
            self._build(spec, servers)

    def score(
        self, spec: str, servers: Servers, groups: Sequence[SampleGroup], *, timeout_s: float, asked_by: threading.Event
    ) -> Scored:
        """Scores groups; `timeout_s` counts from when the reward is built. Raises WorkerLate; WorkerDied, also after
        `kill(asked_by)`; WorkerClosed if that came before scoring began, or after `close`."""
        with self._turn:
            with self._state:
                self._asked_by = asked_by
            try:
                self._build(spec, servers, max(timeout_s, REBUILD_S))
                if asked_by.is_set():
                    raise WorkerClosed
                return self._call(score_groups, spec, servers, self._plugin_files, groups, timeout_s=timeout_s)
            finally:
                with self._state:
                    self._asked_by = None

    def kill(self, asked_by: threading.Event) -> None:
        """Kills the process if it works for `asked_by`; a thread that has not come that far finds the event set."""
        asked_by.set()
        with self._state:
            if self._asked_by is asked_by and self._process is not None:
                self._killed = self._process
                self._process.kill()

    def close(self) -> None:
        """Ends the process for good; a call in progress raises WorkerClosed."""
        with self._state:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._end()

    def _build(self, spec: str, servers: Servers, timeout_s: float | None = None) -> None:
        # A process that was killed counts as alive until it has ended.
        if self._process is None or self._process is self._killed or not self._process.is_alive():
            self._start()
        if (spec, servers) not in self._built:
            self._call(build_reward, spec, servers, self._plugin_files, timeout_s=timeout_s)
            self._built.add((spec, servers))

    def _start(self) -> None:
        self._end()
        # Forking a process that has torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there,), name=PROCESS_NAME)
        with there, self._state, interrupts_blocked():
            if self._closed:
                here.close()
                raise WorkerClosed
            process.start()
            self._process, self._pipe = process, here

    def _call(self, function: Callable[..., T], *args: Any, timeout_s: float | None) -> T:
        assert self._process is not None
        assert self._pipe is not None
        process, late = self._process, threading.Event()

        def give_up() -> None:
            late.set()
            self._killed = process
            process.kill()

        # Also of the message: a worker that is stopped reads none.
        timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            self._pipe.send((function, args))
            connection.wait([self._pipe, process.sentinel])
            # Child processes of the worker may hold the other end open.
            if not self._pipe.poll():
                raise EOFError
            response: T | Failure = self._pipe.recv()
        except (EOFError, ConnectionError):
            exitcode = self._end()
            raise (WorkerClosed if self._closed else WorkerLate if late.is_set() else WorkerDied(exitcode)) from None
        finally:
            timer.cancel()
        if isinstance(response, Failure):
            raise response.error from RemoteTraceback(response.traceback)
        return response

    def _end(self) -> int | None:
        """Ends the process and returns its exit code."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None
        with self._state:
            self._process = self._pipe = None
        self._built.clear()
        pipe.close()
        # A process that ends by itself has a meaningful exit code.
        process.join(1)
        process.kill()
        process.join()
        return process.exitcode


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes started inside never get Ctrl-C or SIGHUP: before `serve` a worker would end with a traceback."""
    # It would be started with the first process, and unblocks signals when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
