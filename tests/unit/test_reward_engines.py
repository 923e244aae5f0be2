"""The engines of a reward model: who serves now, and what happens when a reward could not reach one."""

import asyncio
from pathlib import Path

import pytest

from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.reward import ServedModel
from slime_core.errors import EngineError
from slime_core.rollout.client import EngineClient
from slime_core.rollout.reward_engines import RewardEngines


class Engine:
    def __init__(self):
        self.well = True

    async def call(self, method, *args):
        assert method == "health"
        if not self.well:
            raise EngineError("it is gone")


def info(port):
    return EngineInfo(capabilities=frozenset(), address=f"http://127.0.0.1:{port}", token="t")


def served(*ports):
    return tuple(ServedModel(url=f"http://127.0.0.1:{port}", token="t", model_path="/judge") for port in ports)


@pytest.fixture
def engines():
    return [Engine(), Engine()]


@pytest.fixture
def reward_engines(engines):
    return RewardEngines(EngineClient(engines, concurrency=1), [info(1), info(2)], Path("/judge"), first_index=4)


async def test_well_ones_have_not_changed(reward_engines):
    assert await reward_engines.servers() == served(1, 2)
    assert not await reward_engines.changed(served(1, 2))


async def test_a_lost_one_serves_no_longer_and_another_takes_its_place(engines, reward_engines):
    lost = []
    reward_engines.client.watch(lambda index, error, redispatched: lost.append(index))
    engines[1].well = False
    assert await reward_engines.changed(served(1, 2))
    assert lost == [1]
    assert await reward_engines.servers() == served(1)
    # Whoever had asked both finds out without another look.
    engines[0].well = False
    assert await reward_engines.changed(served(1, 2))
    assert lost == [1]
    waiting = asyncio.create_task(reward_engines.changed(served(1)))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "nobody serves"
    assert lost == [1, 0]
    reward_engines.replaced(5, info(9))
    reward_engines.client.admit(1, Engine())
    assert await waiting
    assert await reward_engines.servers() == served(9)


async def test_ones_that_nobody_watches_end_the_run(engines, reward_engines):
    engines[0].well = False
    with pytest.raises(EngineError, match="it is gone"):
        await reward_engines.changed(served(1, 2))


async def test_ones_that_do_not_come_back(engines, reward_engines):
    def fail(index, error, redispatched):
        if index == 1:
            reward_engines.client.fail(EngineError("lost again after 3 restarts"))

    reward_engines.client.watch(fail)
    for engine in engines:
        engine.well = False
    with pytest.raises(EngineError, match="lost again"):
        await reward_engines.changed(served(1, 2))
