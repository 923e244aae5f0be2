"""A time limit for a test, which also ends one that waits for something that cannot be cancelled."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

AGAIN_S: Final = 1.0
"""Seconds after which a test that has swallowed the end is ended again."""


class TimeIsUp(KeyboardInterrupt):
    """Like Ctrl-C it leaves an event loop, which keeps other exceptions in the task that runs."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp in the block once it has run for so long. Outside the main thread there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def strike(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp(f"it has not ended within {seconds:g} s (--slime-time-limit)")

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
