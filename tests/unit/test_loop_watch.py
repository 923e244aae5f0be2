"""A blocked event loop is reported while it is blocked, with the location of the blocking code."""

import asyncio
import io
import queue
import re
import sys
import time

from slime_core.controller.event_loop_watchdog import EventLoopWatchdog


class Heard(io.StringIO):
    """Puts what was written into a queue when it is flushed."""

    def __init__(self):
        super().__init__()
        # Waits in C: the innermost frame is that of the caller.
        self.printed = queue.SimpleQueue()

    def flush(self):
        self.printed.put(self.getvalue())


def impolite(heard):
    return heard.printed.get(timeout=60)


async def test_the_blocking_code_is_named(monkeypatch):
    """The loop is blocked until the warning is printed."""
    ended_blocks = asyncio.Queue()
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    began = time.monotonic()
    with EventLoopWatchdog(1.0, lambda *held: ended_blocks.put_nowait(held)):
        printed = impolite(heard)
        seconds, where = await asyncio.wait_for(ended_blocks.get(), 60)
    ended = time.monotonic()
    first = re.match(r"warning: nothing has moved in this run for (\d+) s: the event loop is held in ", printed)
    assert first is not None, printed
    assert int(first[1]) <= round(seconds)
    assert 1.25 <= seconds <= ended - began
    assert where in printed
    assert where.endswith(f"{__file__}:{impolite.__code__.co_firstlineno + 1} impolite")


async def test_a_loop_that_turns_is_left_alone(capfd):
    blocked = []
    with EventLoopWatchdog(2.0, lambda seconds, where: blocked.append(seconds)):
        for _ in range(40):
            await asyncio.to_thread(time.sleep, 0.1)
    assert not blocked
    assert capfd.readouterr().err == ""


async def test_leaving_is_not_waited_for():
    began = time.monotonic()
    with EventLoopWatchdog(60, lambda seconds, where: None):
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 14
