"""A loop that something holds is told of while it is held, and with the place."""

import asyncio
import io
import queue
import re
import sys
import time

from slime_core.controller.event_loop_watchdog import LoopWatch


class Heard(io.StringIO):
    """Hands on what was written when it is flushed."""

    def __init__(self):
        super().__init__()
        # Waits in C: the innermost frame is that of whoever asks.
        self.said = queue.SimpleQueue()

    def flush(self):
        self.said.put(self.getvalue())


def impolite(heard):
    return heard.said.get(timeout=60)


async def test_who_holds_the_loop_is_named(monkeypatch):
    """It is held until that has been said."""
    told = asyncio.Queue()
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    began = time.monotonic()
    with LoopWatch(0.2, lambda *held: told.put_nowait(held)):
        said = impolite(heard)
        seconds, where = await asyncio.wait_for(told.get(), 60)
    ended = time.monotonic()
    first = re.match(r"warning: nothing has moved in this run for (\d+) s: the event loop is held in ", said)
    assert first is not None, said
    assert int(first[1]) <= round(seconds)
    assert 0.25 <= seconds <= ended - began
    assert where in said
    assert where.endswith(f"{__file__}:{impolite.__code__.co_firstlineno + 1} impolite")


async def test_a_loop_that_turns_is_left_alone(capfd):
    told = []
    with LoopWatch(0.4, lambda seconds, where: told.append(seconds)):
        for _ in range(20):
            await asyncio.to_thread(time.sleep, 0.03)
    assert not told
    assert capfd.readouterr().err == ""


async def test_leaving_is_not_waited_for():
    began = time.monotonic()
    with LoopWatch(60, lambda seconds, where: None):
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 5
