"""Calls whose caller is cancelled, or that fail: the engine and its servers stay in one state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.contracts.engine import MemoryTag
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_serving.engine import ServingEngine
from slime_serving.held_weights import HeldWeights
from slime_serving.in_flight import RequestsInFlight

SETUP = EngineSetup(
    index=0, model_path=Path("model"), run_dir=Path("run"), device="cpu", seed=0, max_context_len=8, max_batch=8
)


class Server:
    """Does what it is asked for a moment later, whether the caller still waits or not."""

    address, token = "http://server", None

    def __init__(self, name: str, delay_s: float) -> None:
        self.name, self.delay_s = name, delay_s
        self.state = "runs"
        self.version = -1
        self.hangs = self.fails = False

    async def do(self, state: str) -> None:
        await asyncio.sleep(self.delay_s)
        if self.hangs:
            await asyncio.Event().wait()
        if self.fails:
            raise EngineError(f"{self.name} fails")
        self.state = state


class Fleet:
    pid, start_seconds = 1, ()

    def __init__(self) -> None:
        self.servers = [Server("fast", 0.001), Server("slow", 0.02)]
        self.failed_start = self.failed_stop = ""
        self.flushes = 0
        self.fails_to_flush = False
        self.done: set[asyncio.Task[None]] = set()

    async def start(self, setup: EngineSetup) -> None:
        if self.failed_start:
            raise EngineError(self.failed_start)

    def watch(self, on_death) -> None:
        pass

    async def stop(self) -> None:
        for call in self.done:
            call.cancel()
        if self.failed_stop:
            raise EngineError(self.failed_stop)

    async def to(self, state: str) -> None:
        calls = [asyncio.create_task(server.do(state)) for server in self.servers]
        self.done |= set(calls)
        ends = await asyncio.gather(*map(asyncio.shield, calls), return_exceptions=True)
        for end in ends:
            if isinstance(end, asyncio.CancelledError):
                raise EngineError("the connection was closed")
            if end is not None:
                raise end

    async def flush(self) -> None:
        await asyncio.sleep(0.01)
        if self.fails_to_flush:
            raise EngineError("not flushed")
        self.flushes += 1

    async def versions(self) -> Sequence[int]:
        return [server.version for server in self.servers]


class Order:
    incomplete = False

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def check(self, bucket) -> None:
        self.noted.append(f"check {bucket.index}")

    def loaded(self, bucket) -> None:
        self.noted.append(f"loaded {bucket.index}")
        self.incomplete = not bucket.last


class Weights(HeldWeights):
    def __init__(self, fleet: Fleet) -> None:
        self.order: list[str] = []
        super().__init__(fleet, Order(self.order), "engine 0")

    async def send(self, bucket) -> None:
        await self._fleet.to(f"loads {bucket.index}")

    async def checksum(self) -> str:
        return ""


class Engine(ServingEngine):
    ranks_of_server = 1
    entrance = SimpleNamespace(address="http://server", token=None)

    def __init__(self) -> None:
        super().__init__("sample", Fleet())

    async def prepare(self, setup: EngineSetup) -> None:
        self._held = Weights(self._fleet)
        self._requests = RequestsInFlight(
            self._fleet, None, setup, expected_version=lambda: None, request_timeout_s=1, control_timeout_s=1
        )

    def capabilities(self, setup: EngineSetup):
        return frozenset()

    async def health(self) -> None: ...

    async def pause_servers(self, in_flight) -> None:
        await self._fleet.to("paused")

    async def resume_servers(self) -> None:
        await self._fleet.to("runs")

    async def release(self, tags) -> None:
        self._ready()
        if tags := [tag for tag in MemoryTag if tag not in self._absent]:
            await self._fleet.to("asleep")
            self._absent.update(tags)

    async def restore(self, tags) -> None:
        self._ready()
        if self._absent:
            await self._fleet.to("paused")
            self._absent.clear()

    @property
    def states(self) -> set[str]:
        return {server.state for server in self._fleet.servers}

    @property
    def sends_requests(self) -> bool:
        return self._requests.is_open


@pytest.fixture
async def engine():
    engine = Engine()
    await engine.start(SETUP)
    yield engine
    await engine.stop()


async def interrupted(call) -> None:
    """Cancels it when one server has done it, and the other one has not."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_pause(engine):
    await interrupted(engine.pause())
    with pytest.raises(EngineError, match="Call pause first"):
        await engine.endpoints()
    await engine.pause()
    assert engine.states == {"paused"}
    assert await engine.endpoints()


async def test_an_abort(engine, monkeypatch):
    """It continues when the caller has gone: the server may not have the request yet."""
    aborted: asyncio.Queue[list[str]] = asyncio.Queue()
    responds = asyncio.Event()

    async def abort(ids) -> None:
        await responds.wait()
        await aborted.put(ids)

    monkeypatch.setattr(engine._requests, "abort", abort)
    await interrupted(engine.abort(["a"]))
    assert aborted.empty()
    responds.set()
    assert await aborted.get() == ["a"]


async def test_a_pause_that_is_resumed(engine):
    await interrupted(engine.pause())
    await engine.resume()
    assert (engine.states, engine.sends_requests) == ({"runs"}, True)


async def test_a_resume(engine):
    await engine.pause()
    await interrupted(engine.resume())
    await engine.pause()
    assert (engine.states, engine.sends_requests) == ({"paused"}, False)


async def test_sleep(engine):
    await engine.pause()
    await interrupted(engine.sleep())
    await engine.wake_up()
    assert engine.states == {"paused"}


async def test_a_wake_up(engine):
    await engine.pause()
    await engine.sleep()
    await interrupted(engine.wake_up())
    await engine.sleep()
    assert engine.states == {"asleep"}


async def test_a_bucket_that_is_loaded(engine):
    """Its bytes are there until every server has them; only then the next bucket comes, or sleep."""
    await engine.pause()
    await interrupted(engine.load_bucket(SimpleNamespace(index=0, last=False)))
    await engine.load_bucket(SimpleNamespace(index=1, last=False))
    assert engine._held.order == ["check 0", "loaded 0", "check 1", "loaded 1"]


async def test_calls_come_one_after_another(engine):
    await asyncio.gather(
        engine.pause(), engine.pause(), engine.sleep(), engine.wake_up(), engine.resume(), engine.pause()
    )
    assert (engine.states, engine.sends_requests) == ({"paused"}, False)


async def test_a_failed_pause_is_repeated_or_resumed(engine):
    server = engine._fleet.servers[0]
    for _ in range(2):
        server.fails = True
        with pytest.raises(EngineError, match="fast fails"):
            await engine.pause()
        server.fails = False
        with pytest.raises(EngineError, match="Call pause first"):
            await engine.endpoints()
        await engine.pause()
        assert engine.states == {"paused"}
        server.fails = True
        with pytest.raises(EngineError, match="fast fails"):
            await engine.resume()
        server.fails = False
        await engine.pause()
        assert (engine.states, engine.sends_requests) == ({"paused"}, False)
        await engine.resume()
        assert (engine.states, engine.sends_requests) == ({"runs"}, True)


async def test_stop_ends_calls_that_hang(engine):
    engine._fleet.servers[0].hangs = True
    pausing, resuming = asyncio.create_task(engine.pause()), asyncio.create_task(engine.resume())
    await interrupted(engine.sleep())
    await engine.stop()
    with pytest.raises(EngineError, match="the connection was closed"):
        await pausing
    with pytest.raises(EngineError, match="engine 0 was stopped"):
        await resuming
    assert not engine._calls._running


async def test_a_version_is_complete_when_older_prefixes_are_dropped(engine):
    await engine.pause()
    await engine.endpoints()
    for server in engine._fleet.servers:
        server.version = 3
    completing = asyncio.create_task(engine.commit_weights(3))
    await asyncio.sleep(0.005)
    completing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await completing
    assert not engine._fleet.flushes
    with pytest.raises(EngineError, match="a version is partly loaded"):
        await engine.resume()
    await engine.commit_weights(3)
    await engine.resume()
    assert engine.sends_requests


async def test_a_version_whose_end_fails_is_incomplete(engine):
    await engine.pause()
    last = SimpleNamespace(index=0, last=True, version=3)
    with pytest.raises(EngineError, match=r"version 3 was loaded, but its servers report \[-1, -1\]"):
        await engine.load_bucket(last)
    engine._fleet.fails_to_flush = True
    for server in engine._fleet.servers:
        server.version = 3
    with pytest.raises(EngineError, match="not flushed"):
        await engine.load_bucket(last)
    with pytest.raises(EngineError, match="a version is partly loaded"):
        await engine.resume()
    engine._fleet.fails_to_flush = False
    await engine.load_bucket(last)
    await engine.resume()


async def test_a_failed_stop_does_not_hide_why_the_start_failed():
    engine = Engine()
    engine._fleet.failed_start, engine._fleet.failed_stop = "the model is damaged", "process 7 has not ended"
    with pytest.raises(EngineError, match="the model is damaged"):
        await engine.start(SETUP)
