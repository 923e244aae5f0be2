"""AgentThread: the event loop of agent functions, in a thread beside the run's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

END_S: Final = 2.0


class Aside:
    """Work in another thread's event loop, seen from the run's."""

    def __init__(self, thread: AgentThread, work: Coroutine[Any, Any, Any], name: str) -> None:
        self._thread = thread
        self._run = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self.outcome: asyncio.Future[Any] = self._run.create_future()
        thread.call(self._begin, work, name)

    def cancel(self) -> None:
        self._thread.call(self._cancel)

    def _begin(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        self._task = asyncio.create_task(work, name=name)
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        # After the run has ended, no task waits for the result.
        with contextlib.suppress(RuntimeError):
            self._run.call_soon_threadsafe(self._settle, task)

    def _settle(self, task: asyncio.Task[Any]) -> None:
        if self.outcome.done():
            return
        if task.cancelled():
            self.outcome.cancel()
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
            # Marks the exception as retrieved: perhaps no task waits any more.
            self.outcome.exception()
        else:
            self.outcome.set_result(task.result())


class AgentThread:
    """One thread for all agents of a run, since a client created at module level belongs to one event loop. A thread that
    blocks cannot be ended; it ends with the process."""

    _of_runs: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, AgentThread]] = WeakKeyDictionary()

    @classmethod
    def joined(cls) -> AgentThread:
        """The thread of the running loop, started if needed. Each call requires a call of `leave`."""
        run = asyncio.get_running_loop()
        if run not in cls._of_runs:
            cls._of_runs[run] = cls()
        cls._of_runs[run]._num_users += 1
        return cls._of_runs[run]

    def __init__(self) -> None:
        self._num_users = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="agents", daemon=True)
        self._thread.start()
        self._started.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._started.set()
        await self._over.wait()

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> Aside:
        return Aside(self, work, name)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def at_work(self, file: str) -> tuple[str, str]:
        """The name of the running task, and its file and line, if possible in `file`."""
        task = asyncio.current_task(self._loop)
        innermost = frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back
        frame = frame or innermost
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown place"
        return task.get_name() if task is not None else "", where

    async def leave(self) -> None:
        """Ends the thread after the last user has left."""
        self._num_users -= 1
        if self._num_users == 0:
            self._of_runs.pop(asyncio.get_running_loop(), None)
            self.call(self._over.set)
            await asyncio.to_thread(self._thread.join, END_S)
