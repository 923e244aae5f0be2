"""LoopReports: a thread of a worker that reports to the driver whether the event loop turns, and which code blocks it.

The reports have a socket of their own: the loop that writes to the other one is the one that may be blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from types import TracebackType

from slime_core.controller.event_loop_watchdog import location_of
from slime_rollout_workers.channel import send_at_once
from slime_rollout_workers.messages import LoopReport


class LoopReports:
    """A context manager, entered in the loop that it watches."""

    def __init__(self, end: socket.socket, interval_s: float) -> None:
        """Sends a report to `end` every `interval_s`."""
        self._end = end
        self._interval_s = interval_s
        self._ends = threading.Event()
        self._turned = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slime-loop-reports", daemon=True)

    def __enter__(self) -> LoopReports:
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
        self._end.close()

    def _watch(self) -> None:
        # The driver may be gone.
        with contextlib.suppress(ConnectionError):
            while not self._ends.is_set():
                self._report()
                self._ends.wait(self._interval_s)

    def _report(self) -> None:
        """Returns when the loop has turned."""
        self._turned.clear()
        if self._ends.is_set():
            return
        asked, where = time.monotonic(), ""
        self._loop.call_soon_threadsafe(self._turned.set)
        while not self._turned.wait(self._interval_s):
            where = location_of(self._watched)
            send_at_once(self._end, LoopReport(turns=False, blocked_s=time.monotonic() - asked, where=where))
        blocked_s = time.monotonic() - asked if where else 0.0
        send_at_once(self._end, LoopReport(turns=True, blocked_s=blocked_s, where=where))
