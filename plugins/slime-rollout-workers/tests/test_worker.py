"""A worker that cannot send or take a message: no one waits for ever."""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.config.part import PluginSpec
from slime_core.contracts.generator import Episode, Generator
from slime_core.errors import PluginError
from slime_core.registry.boundary import with_name
from slime_core.rollout.groups import GroupSettings, failed_sample
from slime_core.types.completion import SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, Status
from slime_rollout_workers import worker as worker_module
from slime_rollout_workers.channel import Channel
from slime_rollout_workers.messages import Call, Called, Failed, Finished, Generated, RunnerSetup, StartGroup
from slime_rollout_workers.worker import DriversEngines, Worker, work

PATIENCE_S = 30.0
SETTINGS = GroupSettings(
    scope="train", num_samples=2, sampling=SamplingParams(max_new_tokens=4), seed=0, max_context_len=None, scoring=None,
    evaluation=False, max_retries=0,
)  # fmt: skip
RUNNER = pickle.dumps(RunnerSetup(settings=SETTINGS, generator="odd"))


class Odd(Generator):
    """Its metadata cannot be pickled in the group with index 3."""

    async def generate(self, episode: Episode) -> Sequence[Sample]:
        index = episode.prompt.group_index
        metadata: dict[str, int] = defaultdict(lambda: 0, turns=1) if index == 3 else {"turns": 1}
        return [replace(failed_sample(episode.prompt, 2 * index), status=Status.COMPLETED, metadata=metadata)]


class Agreement:
    plugin_files = ()

    def registry(self) -> None:
        return None

    def resolve(self, spec: PluginSpec, registry: None) -> Any:
        raise PluginError(f"{spec.name} has no class.")


def setup() -> Any:
    engine = PluginSpec(group="slime.engines", name="sglang", options={})
    return SimpleNamespace(agreement=Agreement(), engine=engine, max_calls=1, reward_workers=1, reward_timeout=None)


class Ends:
    """A worker, and the driver's end of its channel."""

    def __init__(self, here: Channel, there: Channel) -> None:
        self.here, self.there = here, there
        self.worker = Worker(setup(), here.send)
        self.worker._generators["odd"] = with_name(Odd(), 'generator "odd"')
        self.worker._tokenizer = SimpleNamespace()  # type: ignore[assignment]
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self.reading = asyncio.create_task(there.read(self.received.put_nowait))

    async def next(self) -> Any:
        return await asyncio.wait_for(self.received.get(), PATIENCE_S)

    async def close(self) -> None:
        await self.worker.close()
        await self.here.close()
        await self.reading
        await self.there.close()


@pytest.fixture
async def ends() -> Ends:
    here, there = socket.socketpair()
    return Ends(await Channel.over(here), await Channel.over(there))


def start(index: int) -> StartGroup:
    prompt = Prompt(
        group_index=index, text="", token_ids=np.array([1, 2], np.int32), origin=f"train.jsonl, line {index}"
    )
    return StartGroup(index, RUNNER, prompt, None, False)


async def test_a_group_whose_samples_cannot_be_sent_fails_alone(ends: Ends) -> None:
    for index in (2, 3, 4):
        ends.worker.take(start(index))
    messages = [await ends.next() for _ in range(5)]
    of = {index: [message for message in messages if message.number == index] for index in (2, 3, 4)}
    for index in (2, 4):
        assert [type(message) for message in of[index]] == [Generated, Finished]
    (failed,) = of[3]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, PluginError)
    text = str(failed.error)
    assert text.startswith('generator "odd", the samples of train.jsonl, line 3: cannot be sent')
    assert "AttributeError: " in text
    assert "--rollout-workers 0" in text
    # The cause's traceback.
    assert "in packet" in failed.error.__notes__[-1]
    await ends.close()


async def test_a_call_for_which_there_is_no_caller_gets_its_error(ends: Ends) -> None:
    ends.worker.take(Call(5, "generate"))
    called = await ends.next()
    assert isinstance(called, Called)
    assert called.number == 5
    assert isinstance(called.result, PluginError)
    assert "sglang has no class" in str(called.result)
    await ends.close()


async def test_a_response_that_cannot_be_sent_is_an_error_of_its_call(ends: Ends) -> None:
    class Caller:
        async def call(self, asked: object) -> Any:
            return defaultdict(lambda: 0)

        async def close(self) -> None:
            return

    ends.worker._caller = Caller()  # type: ignore[assignment]
    ends.worker.take(Call(5, "generate"))
    called = await ends.next()
    assert isinstance(called.result, PluginError)
    assert 'engine "sglang", the response to a call: cannot be sent' in str(called.result)
    await ends.close()


async def test_a_question_that_cannot_be_sent_is_an_error_where_it_was_asked(ends: Ends) -> None:
    engines = DriversEngines(ends.worker._ask)
    asked: Any = [defaultdict(lambda: 0)]
    with pytest.raises(PluginError, match="changed of its engines: cannot be sent"):
        await asyncio.wait_for(engines.changed(asked), PATIENCE_S)
    await ends.close()


async def test_a_message_that_a_worker_cannot_take_ends_it_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Worker):
        def take(self, message: object) -> None:
            raise ValueError(f"what is {message}?")

        async def open(self) -> None:
            return

    monkeypatch.setattr(worker_module, "Worker", Broken)
    here, there = socket.socketpair()
    driver = await Channel.over(there)
    driver.send("this")
    with pytest.raises(ValueError, match=r"what is this\?"):
        await asyncio.wait_for(work(here, setup()), PATIENCE_S)
    await driver.close()
