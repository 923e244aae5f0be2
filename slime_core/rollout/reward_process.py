"""RewardProcess: a process that builds rewards and scores groups by them, as the threads see it that ask it.

One that dies, whenever that is, is replaced when the next one asks; who had asked it is told. A process of its own for each
answer that is waited for: nobody else's task can be lost with it.
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
from typing import Any, TypeVar

from slime_core.registry.plugin_file import PluginFile
from slime_core.rollout.reward_worker import Failure, Scored, Servers, build_reward, score_groups, serve
from slime_core.types.sample import SampleGroup

T = TypeVar("T")


class WorkerDied(Exception):
    """The process ended before it answered."""

    def __init__(self, exitcode: int | None) -> None:
        super().__init__(f"exit code {exitcode}")
        self.exitcode = exitcode


class WorkerLate(Exception):
    """There was no answer in time. The process was killed."""


class WorkerClosed(Exception):
    """Nobody waits for the answer any more. The process was killed, or was never started."""


class RemoteTraceback(Exception):
    """The traceback of a worker process, as the cause of what is raised here."""


class RewardProcess:
    """Started by the first one that asks. One asks at a time; the others wait."""

    def __init__(self, plugin_files: tuple[PluginFile, ...]) -> None:
        self._plugin_files = plugin_files
        self._turn = threading.Lock()
        self._state = threading.Lock()
        """Of what `kill` looks at."""
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._built: set[tuple[str, Servers]] = set()
        self._asked_by: object | None = None
        self._closed = False

    def build(self, spec: str, servers: Servers) -> None:
        """Raises what building the reward raises, and WorkerDied."""
        with self._turn:
            self._build(spec, servers)

    def score(
        self, spec: str, servers: Servers, groups: Sequence[SampleGroup], *, timeout_s: float, asked_by: object
    ) -> Scored:
        """The time begins when the reward is built. WorkerLate; WorkerDied, also of a `kill(asked_by)`; WorkerClosed if that
        came before it began, or after `close`."""
        with self._turn:
            with self._state:
                self._asked_by = asked_by
            try:
                self._build(spec, servers)
                with self._state:
                    if self._asked_by is not asked_by:
                        raise WorkerClosed
                return self._call(score_groups, spec, servers, self._plugin_files, groups, timeout_s=timeout_s)
            finally:
                with self._state:
                    self._asked_by = None

    def kill(self, asked_by: object) -> None:
        """If it is this one that it works for."""
        with self._state:
            if self._asked_by is asked_by:
                self._asked_by = None
                if self._process is not None:
                    self._process.kill()

    def close(self) -> None:
        """For good; whoever waits for an answer gets WorkerClosed."""
        with self._state:
            self._closed = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._end()

    def _build(self, spec: str, servers: Servers) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        if (spec, servers) not in self._built:
            self._call(build_reward, spec, servers, self._plugin_files, timeout_s=None)
            self._built.add((spec, servers))

    def _start(self) -> None:
        self._end()
        # Forking a process that has torch's threads can deadlock.
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there,), name="slime-rewards")
        with there, self._state, interrupts_held_back():
            if self._closed:
                here.close()
                raise WorkerClosed
            process.start()
            self._process, self._pipe = process, here

    def _call(self, function: Callable[..., T], *args: Any, timeout_s: float | None) -> T:
        assert self._process is not None
        assert self._pipe is not None
        try:
            self._pipe.send((function, args))
            if not connection.wait([self._pipe, self._process.sentinel], timeout_s):
                self._process.kill()
                self._end()
                raise WorkerLate
            # Others that the process has started may hold the other end open.
            if not self._pipe.poll():
                raise EOFError
            answer: T | Failure = self._pipe.recv()
        except (EOFError, ConnectionError):
            exitcode = self._end()
            if self._closed:
                raise WorkerClosed from None
            raise WorkerDied(exitcode) from None
        if isinstance(answer, Failure):
            raise answer.error from RemoteTraceback(answer.traceback)
        return answer

    def _end(self) -> int | None:
        """Its exit code."""
        process, pipe = self._process, self._pipe
        if process is None or pipe is None:
            return None
        with self._state:
            self._process = self._pipe = None
        self._built.clear()
        pipe.close()
        # One that ends by itself says how.
        process.join(1)
        process.kill()
        process.join()
        return process.exitcode


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """What is started meanwhile never sees Ctrl-C: a worker that has not come to `serve` yet would end with a traceback."""
    # Started with the first process, and lets the signals in again when it is.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
