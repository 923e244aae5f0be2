"""load_balance, session_affinity, priority, rate_limit and retry, around calls that follow a script."""

import asyncio
import time

import pytest
from router_script import Held, request, respond, settle, start

from slime_core.contracts.middleware import RouterMiddleware
from slime_core.errors import EngineError, EngineUnavailable
from slime_core.rollout.client import EngineClient
from slime_core.types.completion import SamplingParams
from slime_plugin_kit.fast_clock import run_fast
from slime_router.errors import TooManyRequests
from slime_router.plugin import LoadBalance, Priority, RateLimit, Retry, SessionAffinity


def build(driver, **options) -> RouterMiddleware:
    return driver.build(driver.Config(**options))


def sized(name, prompt, new, engines=(0, 1, 2)):
    return request(name, range(prompt), sampling=SamplingParams(max_new_tokens=new), engines=engines)


async def test_load_balance_sends_to_the_engine_with_the_fewest_tokens():
    held, middleware = Held(), build(LoadBalance)
    tasks = await start(
        middleware, held, sized("a", 90, 10), sized("b", 5, 15), sized("c", 1, 29), sized("d", 1, 19), sized("e", 1, 1)
    )
    # Loads 100, 20, 30; d makes the second 40; e takes the third's 30.
    assert [one.engines for one in held.seen] == [(0, 1, 2), (1, 2, 0), (2, 1, 0), (1, 2, 0), (2, 1, 0)]
    assert middleware.metrics() == {"load_0": 100, "load_1": 40, "load_2": 32}
    await held.finish("a")
    tasks += await start(middleware, held, sized("f", 1, 1, engines=(2, 1)), sized("g", 1, 1))
    assert [one.engines for one in held.seen[5:]] == [(2, 1), (0, 2, 1)]
    tasks[1].cancel()
    await settle()
    assert middleware.metrics() == {"load_0": 2, "load_1": 20, "load_2": 34}
    await held.finish("c", "d", "e", "f", "g")
    assert middleware.metrics() == {}


async def test_load_balance_may_count_requests():
    held, middleware = Held(), build(LoadBalance, measure="requests")
    tasks = await start(middleware, held, sized("a", 1000, 9), sized("b", 1, 1), sized("c", 1, 1), sized("d", 1, 1))
    assert [one.engines[0] for one in held.seen] == [0, 1, 2, 0]
    for task in tasks:
        task.cancel()


async def test_without_engines_to_choose_from_requests_pass():
    for driver in (LoadBalance, SessionAffinity):
        held, asked = Held(), request("a", session_id="s")
        (task,) = await start(build(driver), held, asked)
        assert held.seen == [asked]
        task.cancel()


async def test_a_session_stays_on_its_engine():
    held, middleware = Held(), build(SessionAffinity)

    async def turn(name, session, engines, engine):
        (task,) = await start(middleware, held, request(name, session_id=session, engines=engines))
        await held.finish(name, engine_index=engine)
        await task
        return held.seen[-1].engines

    assert await turn("a0", "a", (0, 1, 2), 2) == (0, 1, 2)
    assert await turn("b0", "b", (1, 2, 0), 0) == (1, 2, 0)
    assert await turn("a1", "a", (0, 1, 2), 2) == (2, 0, 1)
    # It was full: another one responded, which has the newest turn in its cache.
    assert await turn("b1", "b", (0, 1, 2), 1) == (0, 1, 2)
    assert await turn("b2", "b", (0, 1, 2), 1) == (1, 0, 2)
    # Its engine is gone.
    assert await turn("a2", "a", (0, 1), 0) == (0, 1)
    assert await turn("n", None, (0, 1), 0) == (0, 1)
    assert middleware.metrics() == {"sessions": 2, "kept": 2, "moved": 2}


async def test_a_strict_session_goes_nowhere_else_and_old_ones_are_forgotten():
    held, middleware = Held(), build(SessionAffinity, strict=True, max_sessions=2)
    for name, session in (("a", "s"), ("b", "t"), ("c", "s"), ("d", "u"), ("e", "t"), ("f", "s")):
        await start(middleware, held, request(name, session_id=session, engines=(0, 1)))
        await held.finish(name, engine_index=1)
    # u replaced t, the least recently used one; t had replaced s.
    assert [one.engines for one in held.seen] == [(0, 1), (0, 1), (1,), (0, 1), (0, 1), (0, 1)]


async def test_the_most_urgent_goes_first_and_equals_in_order():
    held, middleware = Held(), build(Priority, concurrency=2, levels={"eval": 10, "eval-slow": -1})
    asked = [request(name, priority=priority) for name, priority in
             (("a", 0), ("b", 0), ("c", 0), ("d", 5), ("eval/1", 0), ("e", 5), ("eval-slow/1", 0), ("f", 11))]  # fmt: skip
    tasks = await start(middleware, held, *asked)
    assert held.names == ["a", "b"]
    assert middleware.metrics() == {"running": 2, "waiting": 6, "refused": 0}
    order = []
    while held.open:
        await held.finish(next(iter(held.open)))
        order = held.names[2:]
    assert order == ["f", "eval/1", "d", "e", "c", "eval-slow/1"]
    assert [(await task).request_id for task in tasks] == [one.request_id for one in asked]
    assert middleware.metrics() == {"running": 0, "waiting": 0, "refused": 0}


async def test_a_cancelled_waiting_request_frees_its_place():
    held, middleware = Held(), build(Priority, concurrency=1)
    a, b, c, d = await start(middleware, held, *(request(name) for name in "abcd"))
    b.cancel()
    await settle()
    # c is given a's place and cancelled in the same turn of the loop: d gets it.
    held.open["a"].set_result(respond(request("a")))
    await asyncio.sleep(0)
    c.cancel()
    await settle()
    assert held.names == ["a", "d"]
    assert middleware.metrics()["running"] == 1
    await held.finish("d")
    await asyncio.gather(a, d)
    assert (b.cancelled(), c.cancelled()) == (True, True)
    assert middleware.metrics() == {"running": 0, "waiting": 0, "refused": 0}


async def test_a_failure_frees_the_place_and_a_full_queue_refuses():
    held, middleware = Held(), build(Priority, concurrency=1, max_waiting=1)
    tasks = await start(middleware, held, *(request(name) for name in "abc"))
    with pytest.raises(EngineUnavailable, match="1 requests wait already"):
        await tasks[2]
    held.open["a"].set_exception(EngineError("boom"))
    await settle()
    assert held.names == ["a", "b"]
    await held.finish("b")
    with pytest.raises(EngineError, match="boom"):
        await tasks[0]
    assert middleware.metrics() == {"running": 0, "waiting": 0, "refused": 1}


def test_requests_are_spread_over_time():
    """10 a second, 3 at once: of seven that come together, the first three go, then one every 0.1 s, and the last would
    wait longer than it may."""
    middleware = build(RateLimit, requests_per_second=10, burst=3, max_wait_s=0.35)
    gone = {}

    async def call_next(asked):
        gone[asked.request_id] = asyncio.get_running_loop().time()
        return respond(asked)

    async def scene():
        # Idle time does not allow a larger burst.
        await asyncio.sleep(60)
        calls = (middleware(request(name), call_next) for name in "abcdefg")
        return await asyncio.gather(*calls, return_exceptions=True)

    results = run_fast(scene())
    assert list(gone) == list("abcdef")
    assert list(gone.values()) == pytest.approx([60, 60, 60, 60.1, 60.2, 60.3], abs=1e-6)
    assert isinstance(results[6], TooManyRequests)
    assert results[6].retry_after_s == pytest.approx(0.4, abs=1e-6)
    assert middleware.metrics() == {"delayed": 3, "refused": 1}


@pytest.mark.parametrize(
    ("errors", "num_calls", "expected"),
    [
        ([EngineUnavailable("x"), EngineUnavailable("y")], 3, None),
        ([EngineUnavailable("x")] * 3, 3, EngineUnavailable),
        ([EngineError("x")], 1, EngineError),
        ([EngineUnavailable("x"), EngineError("bad")], 2, EngineError),
        ([TimeoutError()], 1, TimeoutError),
    ],
)
async def test_errors_after_which_a_request_is_sent_again(errors, num_calls, expected):
    middleware, left, calls = build(Retry, attempts=3, backoff_s=0), list(errors), []

    async def call_next(asked):
        calls.append(asked)
        if left:
            raise left.pop(0)
        return respond(asked)

    asked = request("a")
    if expected is None:
        assert (await middleware(asked, call_next)).request_id == "a"
    else:
        with pytest.raises(expected) as caught:
            await middleware(asked, call_next)
        assert type(caught.value) is expected
    assert calls == [asked] * num_calls
    assert middleware.metrics() == {"repeated": num_calls - 1}


async def test_no_attempt_is_begun_after_the_deadline(monkeypatch):
    middleware, calls = build(Retry, attempts=100, backoff_s=0.02, max_backoff_s=0.02, deadline_s=60.0), []
    real, ahead = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)

    async def call_next(asked):
        nonlocal ahead
        calls.append(asked)
        # A minute passes in the third attempt.
        ahead = 60.0 * (len(calls) == 3)
        raise EngineUnavailable("down")

    with pytest.raises(EngineUnavailable, match="down"):
        await middleware(request(), call_next)
    assert len(calls) == 3


class Echo:
    """An engine of a run."""

    def __init__(self, index):
        self.index, self.seen = index, []

    async def generate(self, requests):
        for one in requests:
            self.seen.append(one.request_id)
            yield respond(one, engine_index=self.index)

    async def call(self, method, *args):
        return None


async def test_in_the_driver_sessions_and_load_choose_the_engine():
    engines = [Echo(index) for index in range(3)]
    client = EngineClient(
        engines, concurrency=4, middlewares=[build(LoadBalance), build(SessionAffinity), build(Priority)]
    )
    for turn in range(3):
        await asyncio.gather(
            *(client.generate(request(f"{name}{turn}", range(size), session_id=name)) for name, size in
              (("x", 50), ("y", 9), ("z", 7), ("w", 5)))
        )  # fmt: skip
    # By load: x first, y and z on the empty ones, w beside z; then each stays.
    assert [sorted(engine.seen) for engine in engines] == [
        ["x0", "x1", "x2"],
        ["y0", "y1", "y2"],
        ["w0", "w1", "w2", "z0", "z1", "z2"],
    ]
