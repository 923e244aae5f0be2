"""A worker's event loop that does not turn is noticed, and the code that blocks it is named."""

from __future__ import annotations

import asyncio
import queue
import re
import socket
import threading
from collections.abc import Callable

import pytest

from slime_plugin_kit.fast_clock import FastClock, run_fast
from slime_rollout_workers.channel import Channel
from slime_rollout_workers.hang_watch import HangWatch
from slime_rollout_workers.loop_reports import LoopReports
from slime_rollout_workers.messages import LoopReport

LIMIT_S = 100.0
TURNS = LoopReport(turns=True, blocked_s=0.0, where="")


def blocked(seconds: float) -> LoopReport:
    return LoopReport(turns=False, blocked_s=seconds, where="tool.py:3 search")


class Watched:
    """A HangWatch, and what it calls."""

    def __init__(self) -> None:
        self.hangs: list[str] = []
        self.hung = asyncio.Event()
        self.blocks: list[tuple[float, str]] = []
        self.watch = HangWatch(
            "rollout worker 1",
            LIMIT_S,
            on_hang=self.hang,
            on_blocked=lambda seconds, where: self.blocks.append((seconds, where)),
        )

    def hang(self, why: str) -> None:
        self.hangs.append(why)
        self.hung.set()

    async def report(self, report: LoopReport, seconds: float) -> None:
        """Every five seconds, for so long."""
        for _ in range(int(seconds / 5)):
            self.watch.take(report)
            await asyncio.sleep(5.0)

    async def hang_after(self) -> float:
        """Seconds until it hangs."""
        began = asyncio.get_running_loop().time()
        await self.hung.wait()
        return asyncio.get_running_loop().time() - began


def test_a_process_that_reports_nothing_hangs_once() -> None:
    async def scene() -> None:
        it = Watched()
        # Before the first report, imports may take their time.
        await asyncio.sleep(5000.0)
        it.watch.take(TURNS)
        it.watch.begin()
        await it.report(TURNS, 1000.0)
        assert not it.hangs
        assert LIMIT_S - 5.0 <= await it.hang_after() <= 1.1 * LIMIT_S
        await asyncio.sleep(1000.0)
        assert len(it.hangs) == 1
        assert re.search(r"reported nothing for 100 s \(--rollout-worker-timeout\)", it.hangs[0])
        assert not it.blocks

    run_fast(scene())


def test_a_blocked_loop_hangs_though_its_process_reports(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        it = Watched()
        # Models that a start loads.
        await it.report(blocked(1.0), 1000.0)
        it.watch.take(TURNS)
        it.watch.begin()
        reporting = asyncio.create_task(it.report(blocked(12.0), 1000.0))
        assert LIMIT_S <= await it.hang_after() <= 1.1 * LIMIT_S
        reporting.cancel()
        assert re.search(r"did not turn for 100 s .*blocked in tool\.py:3 search", it.hangs[0])
        await asyncio.sleep(0)
        assert it.blocks == [(12.0, "rollout worker 1: tool.py:3 search")]

    run_fast(scene())
    warned = capfd.readouterr().err
    assert (
        warned.count("warning: the event loop of rollout worker 1 has been blocked for 12 s in tool.py:3 search") == 1
    )


def test_a_loop_that_turns_again_is_reported_and_does_not_hang(capfd: pytest.CaptureFixture[str]) -> None:
    async def scene() -> None:
        it = Watched()
        it.watch.take(TURNS)
        it.watch.begin()
        for _ in range(3):
            await it.report(blocked(9.0), 90.0)
            it.watch.take(LoopReport(turns=True, blocked_s=9.9, where="tool.py:3 search"))
        assert not it.blocks
        await it.report(blocked(60.0), 90.0)
        it.watch.take(LoopReport(turns=True, blocked_s=90.0, where="tool.py:3 search"))
        await it.report(TURNS, 200.0)
        it.watch.close()
        await asyncio.sleep(1000.0)
        assert not it.hangs
        assert it.blocks == [(90.0, "rollout worker 1: tool.py:3 search")]

    run_fast(scene())
    assert capfd.readouterr().err.count("warning") == 1


def test_time_in_which_the_driver_was_stopped_does_not_count() -> None:
    async def scene() -> None:
        it = Watched()
        clock = asyncio.get_running_loop()
        assert isinstance(clock, FastClock)
        it.watch.take(TURNS)
        it.watch.begin()
        for _ in range(10):
            await it.report(TURNS, 50.0)
            clock.now += 1e6
            # The check that is due comes before the reports that wait in the socket.
            await asyncio.sleep(1.0)
        assert not it.hangs

    run_fast(scene(), patience_s=2e7)


def hold(released: queue.SimpleQueue[None]) -> None:
    released.get()


async def test_a_thread_reports_the_code_that_blocks_the_loop() -> None:
    """The loop is blocked until its thread has reported that."""
    here, there = socket.socketpair()
    released: queue.SimpleQueue[None] = queue.SimpleQueue()
    received: queue.SimpleQueue[LoopReport] = queue.SimpleQueue()
    place = f"{__file__}:{hold.__code__.co_firstlineno + 1} hold"

    async def read() -> None:
        def take(report: LoopReport) -> None:
            received.put(report)
            if report.where.endswith(place) and not report.turns:
                released.put(None)

        await (await Channel.over(here)).read(take)

    blocked: list[LoopReport] = []

    async def next_that(is_it: Callable[[LoopReport], bool]) -> LoopReport:
        while not is_it(report := await asyncio.to_thread(received.get, timeout=60)):
            blocked.append(report)
        blocked.append(report)
        return report

    reader = threading.Thread(target=lambda: asyncio.run(read()))
    reader.start()
    with LoopReports(there, 0.02):
        await next_that(lambda report: report.turns)
        blocked.clear()
        hold(released)
        during = await next_that(lambda report: report.where.endswith(place))
        after = await next_that(lambda report: report.turns)
        await next_that(lambda report: report == TURNS)
    reader.join(30)
    assert not reader.is_alive()
    assert not during.turns
    assert 0 < during.blocked_s <= after.blocked_s
    # A thread that was late may have looked once more, when the block had ended.
    assert after.where == [report.where for report in blocked if not report.turns][-1]


async def test_a_thread_ends_with_its_driver() -> None:
    here, there = socket.socketpair()
    before = threading.enumerate()
    with LoopReports(there, 0.01):
        (thread,) = (one for one in threading.enumerate() if one not in before)
        here.close()
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()
    assert there.fileno() == -1
