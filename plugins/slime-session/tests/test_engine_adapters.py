"""Snapshots in several engines, where the caller does not wait for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime_session import engine_adapters
from slime_session.engine_adapters import EngineAdapters


class Client:
    """Two engines; each call takes a moment."""

    indices = (0, 1)

    def __init__(self) -> None:
        self.engines = {0: object(), 1: object()}
        self.calls: list[tuple[int, str]] = []

    def engine(self, index: int) -> object:
        return self.engines[index]

    async def ask_one(self, index: int, method: str, *args: Any) -> list[None]:
        await asyncio.sleep(0.01)
        self.calls.append((index, method))
        return [None]


@pytest.fixture
def client(monkeypatch) -> Client:
    monkeypatch.setattr(engine_adapters.Vocabulary, "of", lambda run: None)
    monkeypatch.setattr(engine_adapters, "max_snapshots", lambda run: 1)
    return Client()


async def test_all_engines_drop_a_snapshot_whose_caller_has_gone(client):
    adapters = EngineAdapters(SimpleNamespace(run=None, client=client), SimpleNamespace())
    held = await adapters.hold("a", 1.0, SimpleNamespace())
    dropping = asyncio.create_task(adapters.drop(held))
    await asyncio.sleep(0.015)
    dropping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropping
    # There is room for one: it is loaded where the other one has gone.
    await adapters.hold("b", 1.0, SimpleNamespace())
    loads = [(0, "load_adapter"), (1, "load_adapter")]
    assert client.calls == [*loads, (0, "drop_adapter"), (1, "drop_adapter"), *loads]


async def test_a_drop_whose_caller_has_gone_has_ended_when_the_session_closes(client):
    adapters = EngineAdapters(SimpleNamespace(run=None, client=client), SimpleNamespace())
    held = await adapters.hold("a", 1.0, SimpleNamespace())
    dropping = asyncio.create_task(adapters.drop(held))
    await asyncio.sleep(0)
    dropping.cancel()
    await adapters.close()
    assert client.calls[2:] == [(0, "drop_adapter"), (1, "drop_adapter")]
