"""What servers hold after adapters were dropped, refused or given up, whatever else runs meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from slime_core.errors import EngineError, EngineRefused
from slime_plugin_kit.adapters_case import bucket_of, peft_model
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_serving.adapter_calls import AdapterCalls
from slime_serving.adapter_options import AdapterOptions
from slime_serving.adapters import ServedAdapters
from slime_serving.whole_calls import WholeCalls
from slime_training.adapters.engine import PromptLogProbs

REFUSED = 99


class Adapters(ServedAdapters):
    """Servers that hold what they were sent, some time after it was sent. `held` has (name, server)."""

    servers = ("a", "b")

    def __init__(self, folder: Path, model: Path) -> None:
        super().__init__(AdapterOptions(max_adapters=2), folder, model, engine="engine 0")
        self.held: set[tuple[str, str]] = set()
        self.silent: set[tuple[str, str]] = set()
        """What a server does not forget."""
        self.refuses = False
        self.forgot: list[str] = []

    async def send(self, name: str, folder: Path) -> None:
        await asyncio.sleep(0.01)
        assert (folder / "adapter_config.json").is_file()
        if self.refuses:
            raise EngineError("no room")
        self.held |= {(name.partition("#")[0], server) for server in self.servers}

    async def forget(self, name: str) -> None:
        name = name.partition("#")[0]
        self.forgot.append(name)
        await asyncio.sleep(0.01)
        self.held -= {(name, server) for server in self.servers} - self.silent
        if any(own == name for own, _ in self.silent):
            raise EngineError("a server does not respond")

    def names(self) -> set[str]:
        return {name for name, _ in self.held}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def bucket(model):
    return bucket_of(peft_model(model, 1, targets=("q_proj",)))


@pytest.fixture
def adapters(tmp_path, model):
    return Adapters(tmp_path / "adapters", model)


class Requests:
    """Requests that end when they are aborted; one more would enter meanwhile."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self.problems: list[str | None] = []

    def using(self, name: str) -> list[str]:
        return ["waits"] if name in self.adapters.names() else []

    async def abort(self, ids: list[str]) -> None:
        await asyncio.sleep(0.01)
        assert not ids or self.adapters.names() == {"x"}
        self.problems.append(self.adapters.problem("x"))


class Scores:
    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self.may_end = asyncio.Event()

    async def prompt(self, tokens, top_k, adapter) -> PromptLogProbs:
        if tokens[0] == REFUSED:
            raise EngineRefused("token 99")
        await self.may_end.wait()
        assert self.adapters.names() == {"x"}, "unloaded while a prompt is read with it"
        empty = np.empty((len(tokens) - 1, top_k), np.int32)
        return PromptLogProbs(log_probs=empty[:, 0].astype(np.float32), top_ids=empty, top_log_probs=empty.astype("f"))


class Engine(AdapterCalls):
    _name = "engine 0"

    def __init__(self, adapters: Adapters) -> None:
        self._adapters, self._scores, self._scoring, self._calls = adapters, Scores(adapters), {}, WholeCalls()
        self.requests = Requests(adapters)

    def _ready(self):
        class Setup:
            model_path = None

        return Setup

    def _asked(self):
        return self.requests


async def test_a_dropped_adapter_stays_until_nothing_uses_it(adapters, bucket, monkeypatch):
    monkeypatch.setattr("slime_serving.adapter_calls.vocab_size_of", lambda setup: 100)
    engine = Engine(adapters)
    await engine.load_adapter("x", 2.0, bucket)
    scored = asyncio.create_task(engine.prompt_log_probs([np.array([1, 2, 3], np.int32)], 1, "x"))
    await asyncio.sleep(0)
    dropped = asyncio.create_task(engine.drop_adapter("x"))
    while not engine.requests.problems:  # noqa: ASYNC110 - a list has no event
        await asyncio.sleep(0.01)
    # From the first moment no request can name it, and its place is not free before it is.
    assert engine.requests.problems == ['adapter "x" is not loaded. Loaded: none.']
    assert not dropped.done()
    with pytest.raises(EngineRefused, match="is not loaded"):
        await engine.prompt_log_probs([np.array([1, 2], np.int32)], 1, "x")
    engine._scores.may_end.set()
    assert len((await scored)[0].log_probs) == 2
    await dropped
    assert adapters.names() == set()
    await engine.drop_adapter("x")
    await engine.load_adapter("x", 2.0, bucket)
    assert adapters.names() == {"x"}
    with pytest.raises(EngineRefused, match="the name is in use"):
        await engine.load_adapter("x", 2.0, bucket)


async def test_a_drop_whose_caller_is_cancelled_runs_to_its_end(adapters, bucket, monkeypatch):
    """A second caller shares it, and a load of the same name waits for it."""
    monkeypatch.setattr("slime_serving.adapter_calls.vocab_size_of", lambda setup: 100)
    engine = Engine(adapters)
    await engine.load_adapter("x", 2.0, bucket)
    scored = asyncio.create_task(engine.prompt_log_probs([np.array([1, 2, 3], np.int32)], 1, "x"))
    await asyncio.sleep(0)
    first, second = (asyncio.create_task(engine.drop_adapter("x")) for _ in range(2))
    await asyncio.sleep(0.05)
    first.cancel()
    loading = asyncio.create_task(engine.load_adapter("x", 2.0, bucket))
    await asyncio.sleep(0.05)
    assert first.cancelled()
    assert not second.done()
    assert not loading.done()
    engine._scores.may_end.set()
    await scored
    await second
    assert (adapters.names(), adapters.forgot) == (set(), ["x"])
    await loading
    assert adapters.names() == {"x"}


async def test_freeing_is_one_call_that_runs_to_its_end(adapters, bucket):
    await adapters.load("x", 2.0, bucket)
    adapters.withdraw("x")
    first, second = (asyncio.create_task(adapters.free("x")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    loading = asyncio.create_task(adapters.load("x", 2.0, bucket))
    await second
    assert (first.cancelled(), adapters.names(), adapters.forgot) == (True, set(), ["x"])
    await loading
    assert adapters.names() == {"x"}


async def test_an_adapter_that_is_dropped_while_it_is_loaded_is_not_there(adapters, bucket):
    engine = Engine(adapters)
    loading = asyncio.create_task(engine.load_adapter("x", 2.0, bucket))
    await asyncio.sleep(0)
    await engine.drop_adapter("x")
    with pytest.raises(EngineRefused, match="it was dropped while it was loaded"):
        await loading
    assert adapters.held == set()
    assert adapters.problem("x") == 'adapter "x" is not loaded. Loaded: none.'


async def test_prompts_of_a_refused_call_are_waited_for_too(adapters, bucket, monkeypatch):
    monkeypatch.setattr("slime_serving.adapter_calls.vocab_size_of", lambda setup: 100)
    engine = Engine(adapters)
    await engine.load_adapter("x", 2.0, bucket)
    prompts = [np.array([REFUSED, 2], np.int32), np.array([1, 2], np.int32)]
    scored = asyncio.create_task(engine.prompt_log_probs(prompts, 1, "x"))
    await asyncio.sleep(0)
    dropped = asyncio.create_task(engine.drop_adapter("x"))
    await asyncio.sleep(0.05)
    assert not dropped.done()
    engine._scores.may_end.set()
    with pytest.raises(EngineRefused, match="token 99"):
        await scored
    await dropped
    assert adapters.names() == set()


async def test_a_load_that_is_cancelled_leaves_nothing(adapters, bucket, tmp_path):
    loading = asyncio.create_task(adapters.load("x", 2.0, bucket))
    await asyncio.sleep(0.005)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert (adapters.held, list((tmp_path / "adapters").iterdir())) == (set(), [])
    for name in ("x", "y"):
        await adapters.load(name, 2.0, bucket)
    assert adapters.names() == {"x", "y"}


async def test_a_load_that_is_cancelled_twice_leaves_nothing(adapters, bucket):
    loading = asyncio.create_task(adapters.load("x", 2.0, bucket))
    for _ in range(2):
        await asyncio.sleep(0)
        loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await adapters.load("x", 2.0, bucket)
    assert (adapters.names(), adapters.forgot) == ({"x"}, ["x"])


async def test_the_error_of_a_load_comes_before_that_of_freeing_it(adapters, bucket):
    adapters.refuses, adapters.silent = True, {("x", "a")}
    with pytest.raises(EngineRefused, match="adapter x: no room"):
        await adapters.load("x", 2.0, bucket)
    adapters.refuses, adapters.silent = False, set()
    with pytest.raises(EngineRefused, match="the name is in use"):
        await adapters.load("x", 2.0, bucket)
    await adapters.free("x")
    await adapters.load("x", 2.0, bucket)


async def test_leaving_frees_what_can_be_freed(adapters, bucket):
    for name in ("x", "y"):
        await adapters.load(name, 2.0, bucket)
    adapters.silent = {("x", "a")}
    await adapters.leave()
    assert adapters.held == {("x", "a")}
