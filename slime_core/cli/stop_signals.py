"""StopSignals: Ctrl-C, SIGTERM and SIGHUP (the terminal was closed). The first ends the run at the next clean point, a second
Ctrl-C or SIGTERM at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from slime_core.errors import HungUp, Interrupted, Terminated


class StopSignals:
    """A context manager inside a running event loop. While the run starts, a signal cancels the start."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._may_end_at_once = False
        self._loop = asyncio.get_running_loop()
        self._stop: Callable[[], object] = lambda: None
        self._before: dict[signal.Signals, Any] = {}
        self._bell, self._string = socket.socketpair()
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "entered by the task that starts the run"
        self._stop = task.cancel
        # Not the event loop's own handlers: those would wait for a loop that is busy, and so would the second Ctrl-C.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup has SIGHUP ignored: the run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        # The system may hand a signal to any thread. A handler runs in the main one, which sleeps in the loop's poll until
        # something wakes it: this does.
        for end in (self._bell, self._string):
            end.setblocking(False)
        self._loop.add_reader(self._bell, self._bell.recv, 64)
        self._wakeup_before = signal.set_wakeup_fd(self._string.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        self._loop.remove_reader(self._bell)
        self._bell.close()
        self._string.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def started(self, stop_requested: asyncio.Event) -> None:
        """From here on a signal sets `stop_requested`, which the loop checks between two steps and while it generates."""
        self._stop = stop_requested.set
        if self.received is not None:
            # The start was cancelled, and something swallowed the cancellation.
            stop_requested.set()

    def interrupted(self, text: str) -> Interrupted:
        """The error that ends the run, with the exit code of the signal."""
        errors = {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}
        return errors.get(self.received or signal.SIGINT, Interrupted)(text)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A terminal that is closed sends several SIGHUP, and service managers send one after SIGTERM: that is one request.
        if number != signal.SIGHUP:
            if self._may_end_at_once:
                os._exit(128 + number)
            self._may_end_at_once = True
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        # The terminal may be gone. os.write, as a handler may run inside a print.
        with contextlib.suppress(OSError):
            os.write(
                sys.stderr.fileno(), b"\nstopping at the next clean point; Ctrl-C again ends at once, without saving\n"
            )
        self._loop.call_soon_threadsafe(lambda: self._stop())


class EarlyInterrupt:
    """Ctrl-C before `StopSignals` handles it. It is raised at once, and recorded: a library's import may swallow it."""

    def __init__(self) -> None:
        self._received = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if isinstance(error, Exception):
            # Python turns what is raised inside some calls, such as __set_name__, into another error.
            self.raise_if_received()

    def raise_if_received(self) -> None:
        if self._received:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        raise KeyboardInterrupt
