"""A loop that something holds is told of while it is held, and with the place."""

import asyncio
import time

from slime_core.loop_watch import LoopWatch


def impolite(seconds):
    time.sleep(seconds)


async def test_who_holds_the_loop_is_named(capfd):
    told = asyncio.Queue()
    with LoopWatch(0.2, lambda *held: told.put_nowait(held)):
        impolite(0.9)
        said = capfd.readouterr().err
        seconds, where = await told.get()
    assert said.startswith("warning: nothing has moved in this run for 0 s: the event loop is held in ")
    assert 0.25 <= seconds <= 5
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
