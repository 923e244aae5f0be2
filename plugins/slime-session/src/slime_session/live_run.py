"""LiveRun: a started run whose event loop has a thread of its own, so that blocking calls work everywhere: in a script, and in
a notebook, where a loop runs already."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Generic, TypeVar

from slime_core.cli.training import run_to_end
from slime_core.config.bound import BoundRun
from slime_core.controller.run_inputs import RunInputs
from slime_core.controller.session import Session
from slime_core.controller.start_folder import StartOptions
from slime_core.controller.startup import start
from slime_core.errors import Interrupted, PluginError, SlimeError
from slime_core.registry.boundary import error_text, held

T = TypeVar("T")


class Given(Generic[T]):
    """Work that can be cancelled before the loop has it, while it waits for its turn, and while it runs."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    async def run(self) -> T:
        if self._is_cancelled:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        return await self._work()

    def cancel(self) -> None:
        """Called in the loop."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()


class LiveRun:
    """Started when it is made. `close` ends it; a process that ends without leaves no run folder damaged, but may leave
    servers of engines behind."""

    def __init__(
        self, run: BoundRun, inputs: RunInputs, options: StartOptions, observers: Mapping[str, object]
    ) -> None:
        """Raises what the start raises."""
        self._started: Future[Session] = Future()
        self._ended: Future[None] = Future()
        self._ends = False
        """It takes no more work, which the loop might never run."""
        self._under_way: set[Future[Any]] = set()
        self._giving = threading.Lock()
        """Held while one of the last two changes."""
        self._turn: asyncio.Lock
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Future[None]
        work = self._live(run, inputs, options, observers)
        self._thread = threading.Thread(target=self._run_thread, args=(work,), name="slime-session", daemon=True)
        self._running = threading.Event()
        self._thread.start()
        self._running.wait()
        try:
            self.session = self._started.result()
        except BaseException:
            # Interrupted while it starts: whatever has started is ended.
            if not self._started.done():
                self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join()
            raise

    @property
    def is_closed(self) -> bool:
        return self._ended.done()

    def do(self, work: Callable[[], Coroutine[Any, Any, T]], *, interrupt: Callable[[], object] | None = None) -> T:
        """Runs it in the run's loop, after all earlier work, and returns its result. If this thread is interrupted, the work
        is cancelled, and KeyboardInterrupt raised; with `interrupt` that is called instead, and the result awaited."""
        given, future = Given(work), None
        try:
            future = self.begin(given.run, in_turn=True)
            return future.result()
        except CancelledError:
            if self._ends:
                raise closed_meanwhile() from None
            raise
        except SystemExit as error:
            raise PluginError(f"a plugin ended the process: it raised {error_text(error)}.") from error
        except KeyboardInterrupt:
            # Without a future this thread was interrupted when the loop had the work already, perhaps.
            if interrupt is None or future is None:
                # A loop that has been closed has nothing any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(given.cancel)
                raise
            self._loop.call_soon_threadsafe(interrupt)
            return future.result()

    def begin(self, work: Callable[[], Coroutine[Any, Any, T]], *, in_turn: bool = False) -> Future[T]:
        """Runs it in the run's loop beside other work, or, `in_turn`, after all earlier work. Cancelling the future cancels
        it."""
        with self._giving:
            self._require_open()
            future = asyncio.run_coroutine_threadsafe(self._in_turn(work) if in_turn else work(), self._loop)
            self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def close(self, error: BaseException | None = None) -> None:
        """Stops everything that was started. `error`: what ends the session, for observers; it is not raised here. Raises what
        the end raises."""
        if not self.is_closed:
            self._take_no_more()
            ends = error if isinstance(error, Exception | None) else Interrupted("interrupted")
            self._loop.call_soon_threadsafe(self._end, ends)
            self._thread.join()
            raised = self._ended.exception()
            if raised is not None and raised is not ends:
                raise raised

    def _require_open(self) -> None:
        if threading.current_thread() is self._thread:
            raise SlimeError(
                "this session was called from one of its own observers or plugins, which it would have to wait for. Call it "
                "after the call that they observe has returned."
            )
        if self._ends:
            raise SlimeError("this session is closed: open it again.")

    def _take_no_more(self) -> None:
        with self._giving:
            self._ends = True

    def _end(self, error: Exception | None) -> None:
        if self._closing.done():
            return
        if error is None:
            self._closing.set_result(None)
        else:
            self._closing.set_exception(error)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            return await work()

    def _run_thread(self, work: Coroutine[Any, Any, None]) -> None:
        # What it raises is raised again by the thread that waits.
        with contextlib.suppress(asyncio.CancelledError), held() as ended:
            run_to_end(work)
        self._running.set()
        self._take_no_more()
        for future in list(self._under_way):
            # The loop was given these too late to run them, or to cancel them.
            with contextlib.suppress(InvalidStateError):
                future.set_exception(closed_meanwhile())
        error = ended.raised
        if not self._started.done():
            self._started.set_exception(error or Interrupted("interrupted while starting; nothing has changed."))
            error = None
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def _live(
        self, run: BoundRun, inputs: RunInputs, options: StartOptions, observers: Mapping[str, object]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        self._main = main
        self._turn, self._closing = asyncio.Lock(), self._loop.create_future()
        self._running.set()
        try:
            async with start(run, inputs, options, observers) as session:
                self._started.set_result(session)
                await self._closing
        finally:
            self._take_no_more()


def closed_meanwhile() -> SlimeError:
    return SlimeError("this session was closed meanwhile: open it again.")
