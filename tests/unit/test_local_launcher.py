"""Engines in this process: started, and started again in the place of one that failed."""

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.config.part import PluginSpec
from slime_core.contracts.setup import EngineSetup
from slime_core.registry import Registry
from slime_core.registry.plugin_file import PluginFile
from slime_core.workers import local
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_worker import EngineWorkerSpec
from slime_core.workers.local import LocalLauncher

PLUGIN = '''
import asyncio
from slime_core.contracts.engine import EngineDriver, EngineInfo
from slime_core.plugin import driver

NUMBER = 0


class Counted:
    """Knows as the how many-th it was started."""

    number, prepared = 9, False

    async def prepare_start(self, setup):
        self.prepared, self.folder = True, setup.run_dir

    async def start(self, setup):
        global NUMBER
        NUMBER += 1
        self.number, self.folder = NUMBER, setup.run_dir
        (self.folder / f"prepared_{self.number}").touch() if self.prepared else None
        return EngineInfo(capabilities=frozenset(), pid=setup.seed or None)

    async def version(self):
        return self.number

    async def stop(self):
        (self.folder / f"stop_{self.number}").touch()
        if self.number == 1:
            raise RuntimeError("cannot even be stopped")
        if self.number == 3:
            await asyncio.Event().wait()


@driver("slime.engines", "counted")
class CountedDriver(EngineDriver):
    @classmethod
    def build(cls, config):
        return Counted()
'''


@pytest.fixture
def specs(tmp_path):
    file = PluginFile(path=Path("counted.py"), text=PLUGIN, sha256="c" * 64)
    engine = PluginSpec(group="slime.engines", name="counted", options={})
    agreement = Agreement.of([engine.resolve(Registry([file]))], [file])
    return [
        EngineWorkerSpec(
            agreement=agreement,
            engine=engine,
            setup=EngineSetup(
                index=index, model_path=tmp_path, device="cpu", seed=77 * index, max_context_len=8, max_batch=1,
                run_dir=tmp_path,
            ),
        )
        for index in range(2)
    ]  # fmt: skip


async def test_a_failed_engine_is_replaced(specs, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "STOP_S", 0.05)
    launcher = LocalLauncher()
    engines, infos = await launcher.start_engines(specs)
    assert [await engine.call("version") for engine in engines] == [1, 2]
    # This process's id, unless the engine reports one that it started.
    assert [info.pid for info in infos] == [os.getpid(), 77]
    # Stopping the first one fails, and its replacement does not start: neither prevents the next start.
    for number in (3, 4):
        async with asyncio.timeout(60):
            successor, info = await launcher.restart_engine(0)
        assert (await successor.call("version"), info.pid) == (number, os.getpid())
    assert await engines[1].call("version") == 2
    await launcher.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stop_1", "stop_2", "stop_3", "stop_4"]


async def test_an_engine_that_fails_to_stop_leaves_no_other_running(specs, tmp_path, monkeypatch):
    launcher = LocalLauncher()
    (stuck, other), _ = await launcher.start_engines(specs)
    number = await other.call("version")

    async def call(method):
        raise RuntimeError("cannot even be stopped")

    monkeypatch.setattr(stuck, "call", call)
    with pytest.raises(RuntimeError, match="cannot even be stopped"):
        await launcher.stop()
    assert [path.name for path in tmp_path.iterdir()] == [f"stop_{number}"]


async def test_an_engine_that_was_prepared_is_the_one_that_starts(specs, tmp_path):
    launcher = LocalLauncher()
    await launcher.prepare_engines(specs)
    engines, _ = await launcher.start_engines(specs)
    numbers = [await engine.call("version") for engine in engines]
    assert {path.name for path in tmp_path.iterdir()} == {f"prepared_{number}" for number in numbers}
    # A run whose trainers fail.
    other = LocalLauncher()
    await other.prepare_engines(specs)
    await other.stop()
    assert (tmp_path / "stop_9").exists()


async def test_an_engine_that_was_ended_is_ended_once(specs, tmp_path):
    launcher = LocalLauncher()
    _, lost = (await launcher.start_engines(specs))[0]
    stopped = f"stop_{await lost.call('version')}"
    await launcher.end_engine(1)
    (tmp_path / stopped).unlink()
    await launcher.end_engine(1)
    successor, _ = await launcher.restart_engine(1)
    assert await successor.call("version")
    assert not list(tmp_path.iterdir())


async def test_a_rank_that_does_not_start_leaves_no_other_running(monkeypatch):
    closed = []

    class Worker:
        def __init__(self, spec):
            if spec.setup.role == "critic":
                raise RuntimeError("no such model")

        def close(self):
            closed.append("actor")

    monkeypatch.setattr(local, "TrainWorker", Worker)
    launcher = LocalLauncher()
    roles = [SimpleNamespace(setup=SimpleNamespace(role=role, rank=0)) for role in ("actor", "critic")]
    with pytest.raises(RuntimeError, match="no such model"):
        await launcher.start_trainers(roles)
    await launcher.stop()
    assert closed == ["actor"]


async def test_ranks_work_in_one_thread(monkeypatch):
    class Worker:
        def __init__(self, spec):
            self.started = threading.get_ident()

        def train(self):
            return self.started, threading.get_ident()

        def close(self):
            pass

    monkeypatch.setattr(local, "TrainWorker", Worker)
    launcher = LocalLauncher()
    roles = [SimpleNamespace(setup=SimpleNamespace(role=role, rank=0)) for role in ("actor", "critic")]
    ranks = await launcher.start_trainers(roles)
    used = {thread for pair in await asyncio.gather(*(rank.call("train") for rank in ranks)) for thread in pair}
    assert len(used) == 1
    assert threading.get_ident() not in used
    await launcher.stop()


async def test_a_rank_that_hangs_is_left_behind(monkeypatch):
    """The others are closed if its call ends after all."""
    monkeypatch.setattr(local, "RANK_STOP_S", 0.05)
    released, all_closed, closed = threading.Event(), threading.Event(), []

    class Worker:
        def __init__(self, spec):
            self.role = spec.setup.role

        def train(self):
            released.wait()

        def close(self):
            closed.append(self.role)
            if self.role == "actor":
                all_closed.set()

    monkeypatch.setattr(local, "TrainWorker", Worker)
    launcher = LocalLauncher()
    ranks = await launcher.start_trainers(
        [SimpleNamespace(setup=SimpleNamespace(role=role, rank=0)) for role in ("actor", "critic")]
    )
    hanging = asyncio.create_task(ranks[1].call("train"))
    try:
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
            await launcher.stop()
        assert closed == []
    finally:
        released.set()
    await hanging
    assert await asyncio.to_thread(all_closed.wait, 60)
    assert closed == ["critic", "actor"]
