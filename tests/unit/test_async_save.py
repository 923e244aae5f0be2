"""Checkpoints that are written while the run continues: one at a time, each with the state at the time of its save."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.controller.loop import run_loop
from slime_core.errors import ConfigError, EngineError, Interrupted, StorageError
from slime_plugin_kit.simulated_run import IdleRanks, Simulation
from slime_plugin_kit.timed_engine import TimedEngine


class SlowDisk(IdleRanks):
    """Writes staged data when `written` is called; `fails`: the save, counted from 1, for which there is no space."""

    def __init__(self, *, fails: int = 0) -> None:
        self.may_write = asyncio.Event()
        self.fails = fails
        self.folders: list[Path] = []

    async def stage(self, folder: Path) -> None:
        self.folders.append(folder)

    async def written(self) -> None:
        await self.may_write.wait()
        (self.folders[-1] / "weights").write_text("w")
        if len(self.folders) == self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")


def simulate(folder: Path, ranks: IdleRanks, **changes: object) -> Simulation:
    """Two groups of two a step."""
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 8}
    engine = TimedEngine(slots=8, rate=lambda running: 1e5, length=lambda request: 4)
    given = {"num_rollout": 6, "save_interval": 2, "async_save": True, "train_s": 0.0, "rollout": rollout}
    return Simulation(folder=folder, engines=[engine], ranks=ranks, **given | changes)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


def numbers(simulation: Simulation) -> list[list[int]]:
    return [[group.group_index for group in groups] for _, groups in simulation.trained]


def test_steps_continue_until_the_next_save_and_nothing_counts_before_it_is_written(tmp_path):
    async def scene():
        disk = SlowDisk()
        simulation = simulate(tmp_path, disk)
        session = simulation.session()
        running = asyncio.create_task(run_loop(session))
        await until(lambda: len(simulation.trained) == 4)
        # The save after step 4 waits for the one after step 2.
        await asyncio.sleep(0.05)
        assert (len(simulation.trained), len(disk.folders), session.store.steps()) == (4, 1, [])
        assert simulation.session().state.rollout_id == 0
        disk.may_write.set()
        await running
        assert session.store.steps() == [4, 6]
        assert session.saved_rollout_id == 6
        return simulation

    straight = asyncio.run(scene())
    # The checkpoint has the state at the time of the save: a run that resumes from it trains on the same groups.
    shutil.rmtree(tmp_path / "checkpoints/step_6")
    resumed = simulate(tmp_path, IdleRanks())
    asyncio.run(run_loop(resumed.session()))
    assert numbers(resumed) == numbers(straight)[4:]
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize("aside", [False, True])
def test_engines_are_watched_while_the_disk_is_waited_for(tmp_path, aside):
    continued = []

    async def scene():
        ranks = SlowDisk()
        ranks.may_write.set()
        loop, session = asyncio.get_running_loop(), simulate(tmp_path, ranks, async_save=aside).session()
        complete = session.store.complete

        def slowly(unfinished):
            alive = threading.Event()
            loop.call_soon_threadsafe(alive.set)
            continued.append(alive.wait(60))
            return complete(unfinished)

        session.store.complete = slowly
        await run_loop(session)
        assert session.store.steps() == [4, 6]

    asyncio.run(scene())
    assert continued == [True] * 3


def test_a_write_that_fails_ends_the_run_and_loses_nothing_saved(tmp_path):
    async def scene(disk):
        disk.may_write.set()
        simulation = simulate(tmp_path, disk)
        await run_loop(simulation.session())
        return simulation

    # The retry at the end of the run fails too.
    class Full(SlowDisk):
        async def written(self):
            self.fails = max(2, len(self.folders))
            await super().written()

    with pytest.raises(StorageError, match=r"step_\d: no space left to write it.*What was saved before is untouched"):
        asyncio.run(scene(Full()))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]
    simulation = asyncio.run(scene(SlowDisk()))
    assert numbers(simulation) == [[4, 5], [6, 7], [8, 9], [10, 11]]


class Writing(IdleRanks):
    """Begins to write at once, as the threads of ranks do, and makes the folders that it needs."""

    async def stage(self, folder: Path) -> None:
        self.ends = asyncio.get_running_loop().run_in_executor(None, self._write, folder)

    def _write(self, folder: Path) -> None:
        time.sleep(0.05)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "weights").write_text("w")

    async def written(self) -> None:
        await self.ends


def test_a_checkpoint_without_space_for_its_buffer_is_removed(tmp_path, monkeypatch):
    session = simulate(tmp_path, Writing()).session()
    save = session.buffer.save

    def full(folder):
        if session.state.rollout_id > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(folder)

    monkeypatch.setattr(session.buffer, "save", full)
    with pytest.raises(StorageError, match="step_4: no space left"):
        asyncio.run(run_loop(session))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_a_stopped_run_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    async def scene():
        disk = SlowDisk()
        simulation = simulate(tmp_path, disk)
        session = simulation.session()
        running = asyncio.create_task(run_loop(session))
        await until(lambda: disk.folders)
        session.stop_requested.set()
        await asyncio.sleep(0.05)
        assert not running.done()
        disk.may_write.set()
        with pytest.raises(Interrupted):
            await running
        assert session.store.steps()[-1] == session.state.rollout_id == len(simulation.trained)

    asyncio.run(scene())


@pytest.mark.parametrize("fails", [1, 99])
def test_a_stopped_run_makes_up_for_a_write_that_fails(tmp_path, fails):
    """Ctrl-C while it is written: the disk's error ends the run only if the retry fails too."""

    class Full(SlowDisk):
        async def written(self):
            self.fails = len(self.folders) if len(self.folders) <= fails else 0
            await super().written()

    async def scene():
        disk = Full()
        session = simulate(tmp_path, disk).session()
        running = asyncio.create_task(run_loop(session))
        await until(lambda: disk.folders)
        session.stop_requested.set()
        await asyncio.sleep(0.05)
        disk.may_write.set()
        await running

    with pytest.raises(Interrupted if fails == 1 else StorageError):
        asyncio.run(scene())
    done = simulate(tmp_path, IdleRanks()).session().state.rollout_id
    assert done >= 2 if fails == 1 else done == 0


def test_a_write_that_fails_within_a_step_is_reported(tmp_path):
    """The trainers hold no complete state, so the failed checkpoint cannot be written again."""

    class Dies(Simulation):
        async def train(self, rollout_id, groups, version):
            if rollout_id == 2:
                self.ranks.session.optimizer_idle.clear()
                self.ranks.may_write.set()
                await asyncio.sleep(0)
                raise EngineError("a rank has died")
            return await super().train(rollout_id, groups, version)

    async def scene():
        disk = SlowDisk(fails=1)
        made = simulate(tmp_path, disk)
        simulation = Dies(**{name: getattr(made, name) for name in made.__dataclass_fields__})
        disk.session = session = simulation.session()
        await run_loop(session)

    with pytest.raises(StorageError, match="no space left") as raised:
        asyncio.run(scene())
    assert "a rank has died" in str(raised.value.__context__)


def test_a_killed_run_drops_the_checkpoint_that_is_being_written(tmp_path):
    async def scene():
        disk = SlowDisk()
        session = simulate(tmp_path, disk).session()
        running = asyncio.create_task(run_loop(session))
        await until(lambda: disk.folders)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert session.store.steps() == []

    asyncio.run(scene())


def test_a_backend_that_only_waits_for_its_writes_is_refused(bound):
    with pytest.raises(ConfigError, match=r'async_save = true: backend "fake" writes checkpoints only while'):
        bound("--async-save")
