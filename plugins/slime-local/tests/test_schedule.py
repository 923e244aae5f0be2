"""What comes to the engine is let in after the decode step after which it came when it was recorded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import local_oracle as oracle
import pytest

from slime_core.errors import EngineError
from slime_core.types.schedule import EngineEvent, EventKind
from slime_local.schedule import Gate


@dataclass
class Request:
    request_id: str


@dataclass
class Row:
    request: Request


@dataclass
class Decoder:
    """Records the order of its calls."""

    calls: list[Any] = field(default_factory=list)
    request_ids: set[str] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return bool(self.request_ids)

    def submit(self, rows: list[Row]) -> None:
        names = [row.request.request_id for row in rows]
        self.calls.append(names)
        self.request_ids |= set(names)

    def end(self, chosen: Any) -> None:
        ended = {name for name in self.request_ids if chosen(Row(Request(name)))}
        self.calls.append(ended)
        self.request_ids -= ended


async def stop(engine: Any) -> None:
    await engine.stop()


async def fail_a_step(engine: Any) -> None:
    def lost() -> None:
        raise RuntimeError("out of memory")

    engine._decoder.step = lost


def rows(*names: str) -> list[Row]:
    return [Row(Request(name)) for name in names]


async def test_a_script_is_kept_to() -> None:
    recorded = Gate(Decoder(), records=True)
    recorded.loaded(0)
    recorded.submit(rows("a", "b"))
    recorded.stepped()
    recorded.stepped()
    recorded.abort({"a", "ended"})
    recorded.loaded(1)
    recorded.submit(rows("c"))
    events = recorded.drain_events()
    assert [event.at for event in events] == [0, 0, 2, 2, 2]
    assert not recorded.drain_events()

    decoder = Decoder()
    gate = Gate(decoder, records=True)
    gate.replay_events(events)
    # All of it comes too early, and in another order.
    gate.submit(rows("c"))
    gate.submit(rows("b"))
    gate.abort({"a"})
    later = asyncio.create_task(gate.may_load(1))
    assert gate.waits
    await gate.may_load(0)
    gate.loaded(0)
    assert decoder.calls == []
    gate.submit(rows("a"))
    assert decoder.calls == [["a", "b"]]
    assert not gate.waits
    gate.stepped()
    await asyncio.sleep(0)
    assert not gate.waits
    assert not later.done()
    gate.stepped()
    # Nothing is decoded until the weights are there.
    assert decoder.calls == [["a", "b"], {"a"}]
    assert gate.waits
    await later
    gate.loaded(1)
    assert decoder.calls == [["a", "b"], {"a"}, ["c"]]
    assert not gate.waits
    assert not gate.scripted
    assert gate.drain_events() == events
    # What is not in the script is passed on at once.
    gate.submit(rows("d"))
    assert decoder.calls[-1] == ["d"]


async def test_a_new_attempt_counts_steps_from_its_own_start() -> None:
    decoder = Decoder()
    gate = Gate(decoder, records=True)
    gate.replay_events(
        [
            EngineEvent(0, EventKind.SUBMIT, ("a",)),
            EngineEvent(0, EventKind.RESTART),
            EngineEvent(0, EventKind.SUBMIT, ("b",)),
        ]
    )
    gate.submit(rows("a"))
    gate.submit(rows("b"))
    gate.stepped()
    assert decoder.calls == [["a"]]
    # What the process before has must end by itself: nothing else ever ends it.
    assert not gate.waits
    decoder.request_ids.clear()
    gate.stepped()
    assert decoder.calls == [["a"], ["b"]]


async def test_what_the_script_does_not_have_is_passed_on_after_it() -> None:
    decoder = Decoder()
    gate = Gate(decoder, records=False)
    gate.replay_events([EngineEvent(0, EventKind.SUBMIT, ("a",)), EngineEvent(1, EventKind.VERSION, version=0)])
    gate.submit(rows("late", "aborted"))
    gate.submit(rows("a"))
    gate.abort({"a", "aborted"})
    gate.stepped()
    assert decoder.calls == [["a"]]
    await gate.may_load(0)
    gate.loaded(0)
    # "a" was not aborted when it was recorded.
    assert decoder.calls == [["a"], ["late", "aborted"], {"aborted"}]


@pytest.mark.parametrize("ends", [stop, fail_a_step])
async def test_what_waits_for_its_turn_fails_with_the_engine(ends: Any, engines: Any, qwen3: Path) -> None:
    engine = await engines(qwen3)
    await engine.replay_events(
        [EngineEvent(0, EventKind.SUBMIT, ("first",)), EngineEvent(1000, EventKind.VERSION, version=1)]
    )
    calls = [
        asyncio.create_task(engine.generate([oracle.request("second", [3])])),
        asyncio.create_task(engine.load_bucket(oracle.buckets(oracle.plain_model(qwen3), 1)[0])),
        asyncio.create_task(engine.generate([oracle.request("first", [3], max_new_tokens=50, min_new_tokens=50)])),
    ]
    await asyncio.sleep(0)
    await ends(engine)
    ended, waiting = await asyncio.wait(calls, timeout=10)
    assert not waiting
    for call in ended:
        with pytest.raises(EngineError, match="does not decode any more"):
            call.result()


async def test_events_are_not_kept_unless_recorded() -> None:
    """A run that records no schedule may run for weeks."""
    gate = Gate(Decoder(), records=False)
    gate.loaded(0)
    gate.submit(rows("a", "b"))
    gate.abort({"a"})
    assert gate.drain_events() == []
