"""CallLimit: calls that never end are cancelled, on a clock that does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from slime_core.errors import RankTimeout
from slime_core.registry.call_limit import CallLimit
from slime_core.workers.limited_rank import limited
from slime_plugin_kit.fast_clock import FastClock, run_fast

LIMIT_S = 100.0


def error(calls: Sequence[str]) -> RuntimeError:
    return RuntimeError(" ".join(calls))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_calls_that_never_end_are_cancelled_together_once_nothing_happens() -> None:
    async def scene() -> None:
        limit = CallLimit(LIMIT_S, error)

        async def call(name: str, seconds: float) -> str:
            async with limit.call(name):
                await asyncio.sleep(seconds)
            return name

        # As long as others begin and end, one may take longer than the limit.
        calls = [call("long", 500.0), *(call("short", 60.0 * number) for number in range(1, 9))]
        assert await asyncio.gather(*calls) == ["long", *["short"] * 8]

        began = now()
        hanging = [asyncio.create_task(call(name, 1e6)) for name in ("a", "b")]
        await asyncio.sleep(80.0)
        hanging.append(asyncio.create_task(call("c", 1e6)))
        await asyncio.wait(hanging)
        assert 80.0 + LIMIT_S <= now() - began <= 80.0 + 1.1 * LIMIT_S
        assert [str(task.exception()) for task in hanging] == ["a b c"] * 3
        assert await call("next", 99.0) == "next"

    run_fast(scene())


def test_what_a_call_passes_on_is_not_its_time() -> None:
    async def scene() -> None:
        limit = CallLimit(LIMIT_S, error)

        async def call() -> None:
            async with limit.call("a"):
                with limit.passed_on():
                    await asyncio.sleep(5000.0)
                await asyncio.Event().wait()

        began = now()
        with pytest.raises(RuntimeError, match=r"^a$"):
            await call()
        assert 5000.0 + LIMIT_S <= now() - began <= 5000.0 + 1.1 * LIMIT_S

    run_fast(scene())


def test_errors_of_a_call_pass_and_a_cancellation_too() -> None:
    async def scene() -> None:
        limit = CallLimit(LIMIT_S, error)
        with pytest.raises(TimeoutError, match="its own"):
            async with limit.call("a"):
                raise TimeoutError("its own")

        async def wait() -> None:
            async with limit.call("b"):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run_fast(scene())


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    async def scene() -> str:
        limit = CallLimit(LIMIT_S, error)
        clock = asyncio.get_running_loop()
        assert isinstance(clock, FastClock)

        async def call() -> str:
            async with limit.call("a"):
                await asyncio.sleep(50.0)
                clock.now += 1e6
                await asyncio.sleep(40.0)
            return "ended"

        return await call()

    assert run_fast(scene(), patience_s=2e6) == "ended"


class Rank:
    """Its calls take the seconds in their first argument."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        await asyncio.sleep(args[0])
        return method

    async def stream(self, method: str, *args: Any) -> Any:
        for seconds in args:
            await asyncio.sleep(seconds)
            yield seconds


def test_a_rank_that_hangs_is_named_and_is_not_called_again() -> None:
    async def scene() -> None:
        ranks = [Rank(), Rank()]
        group = limited(ranks, "actor", LIMIT_S)
        assert await asyncio.gather(*(rank.call("train", 90.0) for rank in group)) == ["train"] * 2
        assert [item async for item in group[0].stream("export_weights", 90.0, 90.0, 90.0)] == [90.0] * 3
        expected = (
            r"^trainer actor, rank 0 in train and rank 1 in train \(of 2\): not ended within 100 s\. A rank hangs, or, if its "
            r"work takes so long, raise --rank-call-timeout\.$"
        )
        began = now()
        with pytest.raises(RankTimeout, match=expected):
            await asyncio.gather(*(rank.call("train", 1e6) for rank in group))
        assert LIMIT_S <= now() - began <= 1.1 * LIMIT_S
        began = now()
        with pytest.raises(RankTimeout, match="rank 0 in train"):
            await group[1].call("save", 1.0)
        with pytest.raises(RankTimeout, match="rank 0 in train"):
            await anext(group[0].stream("export_weights", 1.0))
        assert now() == began
        assert ranks[1].calls == ["train", "train"]

    run_fast(scene())
