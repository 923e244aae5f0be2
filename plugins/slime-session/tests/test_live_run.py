"""Calls from other threads while a session ends: each returns, with its result or an error that gives the reason."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import wait
from typing import Any

import pytest

import slime_session.live_run
from slime_core.errors import SlimeError
from slime_session.live_run import LiveRun

CLOSED = "this session (is|was) closed"


class Ending(threading.Event):
    """Set when the run's parts are ending; its loop waits for a thread then, as for the join of a process, until `joined`."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = threading.Event()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ending]:
    ending = Ending()

    @contextlib.asynccontextmanager
    async def start(*_: object) -> AsyncIterator[Any]:
        try:
            yield "a session"
        finally:
            asyncio.get_running_loop().run_in_executor(None, ending.joined.wait, 60)
            ending.set()

    monkeypatch.setattr(slime_session.live_run, "start", start)
    yield ending
    ending.joined.set()


def live_run() -> LiveRun:
    return LiveRun(None, None, None, {})  # type: ignore[arg-type]


async def slow() -> int:
    await asyncio.sleep(60)
    return 1


def test_what_is_begun_while_it_ends_is_refused(ending: Ending) -> None:
    live = live_run()
    under_way = live.begin(slow)
    closing = threading.Thread(target=live.close)
    closing.start()
    ending.wait(10)
    with pytest.raises(SlimeError, match=CLOSED):
        live.begin(slow)
    with pytest.raises(SlimeError, match=CLOSED):
        live.do(slow)
    ending.joined.set()
    closing.join(10)
    assert live.is_closed
    assert under_way.done()


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_interrupt_as_work_is_given_cancels_it(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, is_waiting: bool
) -> None:
    """The loop has it, and the thread that gave it has no future of it yet."""
    live, began, go = live_run(), threading.Event(), asyncio.Event()
    give, ended = live.begin, threading.Event()

    async def first() -> None:
        began.set()
        await go.wait()

    async def hanging() -> None:
        began.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    if is_waiting:
        give(first, in_turn=True)
        began.wait(60)

    def interrupted(*given: Any, **how: Any) -> Any:
        give(*given, **how)
        began.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        live.do(hanging)
    monkeypatch.undo()
    live._loop.call_soon_threadsafe(go.set)

    async def next_one() -> int:
        return 1

    assert give(next_one, in_turn=True).result(60) == 1
    assert ended.is_set() is not is_waiting
    ending.joined.set()
    live.close()


def test_calls_that_wait_for_their_turn_end_with_it(ending: Ending) -> None:
    live = live_run()
    errors: list[Exception] = []

    def call() -> None:
        try:
            live.do(slow)
        except SlimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(live._under_way) < 3:
        time.sleep(0.001)
    ending.joined.set()
    live.close()
    for thread in threads:
        thread.join(10)
    assert [str(error) for error in errors] == ["this session was closed meanwhile: open it again."] * 3


def test_work_that_the_loop_never_ran_fails(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given after the loop had cancelled all its tasks, while it waited for threads."""
    live = live_run()
    cancelled = live.begin(slow)
    closing = threading.Thread(target=live.close)
    closing.start()
    wait([cancelled], 60)
    with live._giving:
        late = asyncio.run_coroutine_threadsafe(slow(), live._loop)
        live._under_way.add(late)
    ending.joined.set()
    with pytest.raises(SlimeError, match=CLOSED):
        late.result(10)
    closing.join(10)


def test_a_loop_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(work: Any) -> None:
        work.close()
        raise OSError("too many open files")

    monkeypatch.setattr(slime_session.live_run, "run_to_end", fails)
    with pytest.raises(OSError, match="too many open files"):
        live_run()
