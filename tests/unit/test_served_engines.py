"""Engines of a model that is not trained: who serves now, and what happens to who asks when one is lost."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from slime_core.algorithm.build_batch import build_batch
from slime_core.contracts.engine import EngineInfo
from slime_core.contracts.reward import ServedModel
from slime_core.errors import EngineError
from slime_core.rollout.client import EngineClient
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.teacher_client import TeacherClient
from slime_plugin_kit.groups import group_of


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
    return tuple(
        ServedModel(url=f"http://127.0.0.1:{port}", token="t", model_path="/judge", engine="e") for port in ports
    )


@pytest.fixture
def engines():
    return [Engine(), Engine()]


@pytest.fixture
def served_engines(engines):
    return ServedEngines(
        EngineClient(engines, concurrency=1), [info(1), info(2)], Path("/judge"), engine="e", first_index=4
    )


async def test_healthy_engines_have_not_changed(served_engines):
    assert await served_engines.servers() == served(1, 2)
    assert not await served_engines.changed(served(1, 2))


async def test_a_lost_engine_is_out_of_service_until_it_is_replaced(engines, served_engines):
    lost = []
    served_engines.client.watch(lambda index, error, redispatched: lost.append(index))
    engines[1].well = False
    assert await served_engines.changed(served(1, 2))
    assert lost == [1]
    assert await served_engines.servers() == served(1)
    # A caller that used both servers needs no further check.
    engines[0].well = False
    assert await served_engines.changed(served(1, 2))
    assert lost == [1]
    waiting = asyncio.create_task(served_engines.changed(served(1)))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "no engine serves"
    assert lost == [1, 0]
    served_engines.replaced(5, info(9))
    served_engines.client.admit(1, Engine())
    assert await waiting
    assert await served_engines.servers() == served(9)


async def test_engines_without_a_watcher_raise_their_error(engines, served_engines):
    engines[0].well = False
    with pytest.raises(EngineError, match="it is gone"):
        await served_engines.changed(served(1, 2))


async def test_engines_that_do_not_recover_raise(engines, served_engines):
    def fail(index, error, redispatched):
        if index == 1:
            served_engines.client.fail(EngineError("lost again after 3 restarts"))

    served_engines.client.watch(fail)
    for engine in engines:
        engine.well = False
    with pytest.raises(EngineError, match="lost again"):
        await served_engines.changed(served(1, 2))


class Teacher:
    """Returns -token as the log-prob of each token."""

    def __init__(self, fails=0):
        self.fails = fails
        self.asked = 0

    async def call(self, method, sequences, counts):
        assert method == "score"
        self.asked += 1
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("it is gone")
        return [
            -tokens[len(tokens) - count :].astype(np.float32) for tokens, count in zip(sequences, counts, strict=True)
        ]


def scorer(*teachers, max_losses=3):
    engines = ServedEngines(
        EngineClient(teachers, concurrency=1), [info(1)] * len(teachers), Path("/t"), engine="e", first_index=2
    )
    return TeacherClient("teacher", engines, max_losses=max_losses), engines.client


GROUPS = [group_of(["a" * (n % 7), "b" * (n % 5 + 1)], rewards=[1.0, 0.0], group_index=n) for n in range(80)]
BATCH = build_batch(GROUPS)


def expected_log_probs():
    return np.concatenate([-sample.response_tokens.astype(np.float64) for group in GROUPS for sample in group.samples])


async def test_sequences_of_a_lost_teacher_are_sent_to_another():
    gone, well = Teacher(fails=1), Teacher()
    scoring, client = scorer(gone, well)
    lost = []
    client.watch(lambda index, error, redispatched: lost.append((index, str(error))))
    assert (await scoring.log_probs(BATCH)).tolist() == expected_log_probs().tolist()
    assert lost == [(0, "it is gone")]
    # Three messages of at most 64 samples, and the lost one again.
    assert gone.asked + well.asked == 4


async def test_a_teacher_gets_few_messages_at_once():
    """Each has the time limit of a call: all of a batch together would be over it."""

    class Slow(Teacher):
        now = most = 0

        async def call(self, *asked):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.001)
            self.now -= 1
            return await super().call(*asked)

    teacher, many = Slow(), build_batch([group_of(["ab"] * 8, rewards=[1.0] * 8, group_index=n) for n in range(80)])
    scoring, _ = scorer(teacher)
    assert len(await scoring.log_probs(many)) == len(many.mask)
    assert (teacher.asked, teacher.most) == (10, 2)


async def test_the_client_waits_for_the_only_teacher():
    gone = Teacher(fails=9)
    scoring, client = scorer(gone)
    client.watch(lambda index, error, redispatched: None)
    waiting = asyncio.create_task(scoring.log_probs(BATCH))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    client.admit(0, Teacher())
    assert (await waiting).tolist() == expected_log_probs().tolist()


async def test_a_teacher_that_is_lost_too_often_or_not_watched():
    scoring, _ = scorer(Teacher(fails=1))
    with pytest.raises(ConnectionError, match="it is gone"):
        await scoring.log_probs(BATCH)
    scoring, client = scorer(Teacher(fails=9), max_losses=1)

    def replace_by_the_same(index, error, redispatched):
        asyncio.get_running_loop().call_soon(client.admit, 0, Teacher(fails=9))

    client.watch(replace_by_the_same)
    with pytest.raises(EngineError, match=r"engines.teacher: \d+ sequences were lost 2 times"):
        await scoring.log_probs(BATCH)
