"""Tasks are cancelled only after their requests were aborted."""

from __future__ import annotations

import asyncio

import pytest

import slime_session.aborted_tasks
from slime_session.aborted_tasks import all_or_aborted


class Engine:
    """Requests end when they are aborted; the first abort overtakes them."""

    def __init__(self) -> None:
        self.running: dict[int, asyncio.Event] = {}
        self.aborts = 0
        self.was_cancelled = False

    async def generate(self, number: int) -> int:
        self.running[number] = asyncio.Event()
        try:
            await self.running[number].wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return number

    async def abort(self) -> None:
        self.aborts += 1
        for event in self.running.values() if self.aborts > 1 else ():
            event.set()


async def failing() -> int:
    raise ValueError("wrong")


async def test_results_are_in_order() -> None:
    async def number(value: int) -> int:
        await asyncio.sleep(0.01 / value)
        return value

    engine = Engine()
    assert await all_or_aborted([asyncio.create_task(number(n)) for n in (1, 2, 3)], engine.abort) == [1, 2, 3]
    assert await all_or_aborted([], engine.abort) == []
    assert engine.aborts == 0


@pytest.mark.parametrize("cause", ["cancelled", "failed"])
async def test_requests_end_before_their_tasks(cause: str) -> None:
    engine = Engine()
    tasks = [asyncio.create_task(engine.generate(number)) for number in range(3)]
    if cause == "failed":
        tasks.append(asyncio.create_task(failing()))
    waiting = asyncio.create_task(all_or_aborted(tasks, engine.abort))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if cause == "cancelled":
        waiting.cancel()
    with pytest.raises(asyncio.CancelledError if cause == "cancelled" else ValueError):
        await waiting
    assert (engine.aborts, engine.was_cancelled) == (2, False)
    assert all(task.done() for task in tasks)


async def test_a_task_that_does_not_end_with_its_requests_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_session.aborted_tasks, "GRACE_S", 0.02)
    engine = Engine()
    tool = asyncio.create_task(asyncio.sleep(60, 0))
    waiting = asyncio.create_task(all_or_aborted([tool], engine.abort))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tool.cancelled()
