"""EventLoopWatchdog: reports the code that blocks the event loop.

Generators, middlewares and observers share one event loop with the rest of a run. One that blocks without `await` stops all of
it: responses, weight updates, health checks of engines, Ctrl-C. Only another thread can report it while it lasts.
"""

from __future__ import annotations

import asyncio.events
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Final

FRAMES_SHOWN: Final = 6


class EventLoopWatchdog:
    """A context manager, entered in the loop that it watches."""

    def __init__(self, after_s: float, on_end: Callable[[float, str], None]) -> None:
        """A loop that has been blocked for `after_s` is reported on stderr at once. When it runs again, `on_end` is called in
        it with the seconds that it was blocked and with the location."""
        self._after_s = after_s
        self._on_end = on_end
        self._ends = threading.Event()
        self._turned = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slime-loop-watch", daemon=True)

    def __enter__(self) -> EventLoopWatchdog:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._turned.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(self._after_s / 4):
            self._turned.clear()
            if self._ends.is_set():
                return
            asked = time.monotonic()
            self._loop.call_soon_threadsafe(self._turned.set)
            # The second wait: in a process that was stopped and continues, all threads are late.
            if self._turned.wait(self._after_s) or self._turned.wait(self._after_s / 4):
                continue
            where, seconds = location_of(self._watched), time.monotonic() - asked
            print(
                f"warning: nothing has moved in this run for {seconds:.0f} s: the event loop is held in {where}. What waits "
                "there must await: asyncio.to_thread, or an asynchronous client.",
                file=sys.stderr,
                flush=True,
            )
            self._turned.wait()
            if not self._ends.is_set():
                self._loop.call_soon_threadsafe(self._on_end, time.monotonic() - asked, where)


def location_of(thread: int) -> str:
    """The frames of a thread as `file:line function`, from the callback that the loop called to the innermost."""
    stack = traceback.extract_stack(sys._current_frames()[thread])
    called = [place for place, frame in enumerate(stack) if frame.filename == asyncio.events.__file__]
    inside = stack[called[-1] + 1 :] if called else stack
    return " > ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in inside[-FRAMES_SHOWN:])
