"""Whatever fails beside the optimizer steps ends the run with its own error, after everything that was trained is saved; and
a run that resumes from there misses no prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.contracts.hookspecs import GroupsFinished, RolloutEnd, RolloutStart, StepTrained, hookimpl
from slime_core.contracts.tracker import Tracker
from slime_core.controller.loop import run_loop
from slime_core.controller.session import Session
from slime_core.controller.startup import finish
from slime_core.errors import (
    EngineError,
    Interrupted,
    NonfiniteWeights,
    PluginError,
    RolloutError,
    RolloutsExhausted,
    StorageError,
    TrainingError,
)
from slime_core.registry.hooks import Hooks
from slime_core.types.buffer_item import ItemKind
from slime_core.types.report import TrainReport
from slime_core.types.sample import SampleGroup
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.simulated_run import IdleRanks, Numbers, Simulation
from slime_plugin_kit.timed_engine import TimedEngine

STEPS = 6
BATCH = 4
WAYS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "one ahead": {"max_async_level": 1},
    "three ahead": {"max_async_level": 3, "update_weights_in_flight": False},
    "pooled": {"max_async_level": 2},
}


def simulate(folder: Path, way: str = "in turn", *, kind: type[Simulation] = Simulation, **changes: Any) -> Simulation:
    """Four groups of two a step; every third group has a long response."""

    def length(request: Any) -> int:
        number = int(request.request_id.split("/")[1])
        return (25 if number % 6 == 1 else 10) - (len(request.token_ids) - 1)

    rollout = {
        "rollout_batch_size": BATCH,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 50,
        "max_staleness": 9,
        **WAYS[way],
        **changes.pop("rollout", {}),
    }
    engine = TimedEngine(slots=8, rate=lambda running: 1.0, length=length)
    given = {"engines": [engine], "num_rollout": STEPS, "train_s": 5.0}
    return kind(folder=folder, rollout=rollout, **given | changes)


def ended_by(session: Session, error: type[Exception], match: str = "") -> None:
    with pytest.raises(error, match=match):
        run_fast(run_loop(session))


def steps(simulation: Simulation) -> list[list[int]]:
    return [[group.group_index for group in groups] for _, groups in simulation.trained]


def require_all(session: Session, *trained: Simulation) -> None:
    """Checks that every prompt that was drawn was trained once or is in the buffer."""
    numbers = [number for simulation in trained for step in steps(simulation) for number in step]
    left = [item.prompt.group_index for item in session.buffer.items]
    assert sorted([*numbers, *left]) == list(range(session.buffer.source.state()["next"]))
    assert len(numbers) == STEPS * BATCH


def resume_and_check(folder: Path, way: str, before: Simulation, *, at: int) -> Simulation:
    """Resumes the run without the failure and checks that no prompt is missing. `at`: the step that it resumes from."""
    again = simulate(folder, way)
    session = again.session()
    assert session.state.rollout_id == at
    run_fast(run_loop(session))
    require_all(session, before, again)
    return again


# ---------------------------------------------------------------- while a step is collected


class Fifth(GroupFilter):
    """Rejects every fifth group."""

    def __init__(self) -> None:
        self.seen = 0

    def decide(self, group: Any) -> FilterDecision:
        self.seen += 1
        return FilterDecision(keep=self.seen % 5 > 0, reason="fifth")


class AtRolloutEnd:
    @hookimpl
    def rollout_end(self, event: RolloutEnd) -> None:
        if event.rollout_id == 3:
            raise ValueError("no more")


class AtGroupsFinished:
    """Raises from its third step on, also for groups that were refused in steps that were aborted."""

    @hookimpl
    def groups_finished(self, event: GroupsFinished) -> None:
        if event.rollout_id >= 3:
            raise ValueError("no more")


@pytest.mark.parametrize("observer", [AtRolloutEnd, AtGroupsFinished])
@pytest.mark.parametrize("way", WAYS)
def test_an_observer_that_raises_takes_no_groups_with_it(tmp_path: Path, way: str, observer: type) -> None:
    simulation = simulate(tmp_path, way)
    session = simulation.session()
    session.hooks = Hooks({"observer/module": observer()})
    ended_by(session, PluginError, "no more")
    resume_and_check(tmp_path, way, simulation, at=3)


@pytest.mark.parametrize("observer", [AtRolloutEnd, AtGroupsFinished])
def test_groups_that_go_back_are_observed_by_the_source_once(
    tmp_path: Path, observer: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rates would count them twice."""
    observed: list[int] = []
    monkeypatch.setattr(Numbers, "observe", lambda self, groups: observed.extend(group.group_index for group in groups))
    simulation = simulate(tmp_path, "pooled", filters=[Fifth()])
    session = simulation.session()
    session.hooks = Hooks({"observer/module": observer()})
    ended_by(session, PluginError, "no more")
    again = simulate(tmp_path, "pooled")
    run_fast(run_loop(again.session()))
    trained = [number for run in (simulation, again) for step in steps(run) for number in step]
    assert len(observed) == len(set(observed))
    assert set(trained) < set(observed)


@pytest.mark.parametrize("max_staleness", [0, 9])
def test_groups_of_a_pool_are_kept_if_they_may_be_stale(tmp_path: Path, max_staleness: int) -> None:
    simulation = simulate(tmp_path, "pooled", rollout={"max_staleness": max_staleness})
    session = simulation.session()
    session.hooks = Hooks({"observer/module": AtRolloutEnd()})
    ended_by(session, PluginError, "no more")
    kinds = {item.kind for item in session.buffer.items}
    assert (ItemKind.SURPLUS in kinds) == (max_staleness > 0)


class Raises(GroupFilter):
    """Raises on the fourteenth group."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.seen = error, 0

    def decide(self, group: Any) -> FilterDecision:
        self.seen += 1
        if self.seen == 14:
            raise self.error
        return FilterDecision(keep=self.seen % 5 > 0, reason="fifth")


def test_a_checkpoint_that_fails_does_not_hide_why_the_run_ended(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, "in turn", filters=[Raises(ValueError("what is this"))])
    session = simulation.session()

    async def full(*_: object) -> Any:
        raise StorageError("no space left")

    session.store.begin = full  # type: ignore[method-assign]
    ended_by(
        session, StorageError, r"no space left The run had ended before that, with: group filter Raises, .*what is"
    )


@pytest.mark.parametrize("save_interval", [None, 1])
@pytest.mark.parametrize("way", WAYS)
def test_a_filter_that_raises_takes_no_group_with_it(tmp_path: Path, way: str, save_interval: int | None) -> None:
    """Nor the ones whose observers raise, too. Once is enough, also in a step ahead that a checkpoint aborts."""
    simulation = simulate(tmp_path, way, save_interval=save_interval, filters=[Raises(ValueError("what is this"))])
    session = simulation.session()
    refused: list[int] = []

    class Observer:
        @hookimpl
        def groups_finished(self, event: GroupsFinished) -> None:
            refused.extend(rejected.group.group_index for rejected in event.rejected)
            if not event.accepted:
                raise ValueError("nothing at all")

    session.hooks = Hooks({"observer/module": Observer()})
    ended_by(session, PluginError, r"group filter Raises, decide on .*: raised ValueError: what is this")
    again = simulate(tmp_path, way)
    resumed = again.session()
    assert resumed.state.rollout_id == len(simulation.trained) > 0
    run_fast(run_loop(resumed))
    numbers = [number for step in [*steps(simulation), *steps(again)] for number in step]
    left = [item.prompt.group_index for item in resumed.buffer.items]
    drawn = range(resumed.buffer.source.state()["next"])
    # Without a pool, what the broken step had refused is drawn again.
    assert set(drawn) - {*numbers, *left} <= set(refused)
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("way", WAYS)
def test_an_unrequested_cancellation_is_reported_and_the_run_saved(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancels inside the task of a group, like a reward that cancels what it awaits."""
    simulation = simulate(tmp_path, way)
    session = simulation.session()
    score = session.runner.score  # type: ignore[union-attr]

    async def cancelled(group: SampleGroup) -> SampleGroup:
        if group.group_index == 13:
            raise asyncio.CancelledError
        return await score(group)

    monkeypatch.setattr(session.runner, "score", cancelled)
    ended_by(session, RolloutError, r"collect of step \d: what it awaited was cancelled")
    resume_and_check(tmp_path, way, simulation, at=len(simulation.trained))


@pytest.mark.parametrize("on_the_side", [False, True])
def test_an_evaluation_that_is_cancelled_from_within_is_reported_and_the_run_saved(
    tmp_path: Path, on_the_side: bool
) -> None:
    simulation = simulate(tmp_path, eval_prompts=2, eval={"async_eval": on_the_side})
    session = simulation.session()

    async def evaluate(step: int, version: int) -> Any:
        raise asyncio.CancelledError

    session.evaluator.evaluate = evaluate  # type: ignore[method-assign]
    ended_by(session, RolloutError, "the evaluation was cancelled from within")
    assert simulate(tmp_path).session().state.rollout_id == len(simulation.trained) > 0


# ---------------------------------------------------------------- beside the optimizer steps


class Refuses(Simulation):
    """Its learner raises at the fourth step, before its trainers begin."""

    error: Exception

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        if rollout_id == 3:
            self.error.refused = [group.group_index for group in groups]  # type: ignore[attr-defined]
            raise self.error
        return await super().train(rollout_id, groups, version)


@pytest.mark.parametrize("way", WAYS)
def test_groups_that_could_not_be_trained_are_trained_when_the_run_resumes(tmp_path: Path, way: str) -> None:
    simulation = simulate(tmp_path, way, kind=Refuses)
    simulation.error = error = EngineError("the teacher is gone")  # type: ignore[attr-defined]
    ended_by(simulation.session(), EngineError, "the teacher is gone")
    again = resume_and_check(tmp_path, way, simulation, at=3)
    assert steps(again)[0] == error.refused  # type: ignore[attr-defined]
    if way != "pooled":
        assert [*steps(simulation), *steps(again)] == [
            list(range(n, n + BATCH)) for n in range(0, STEPS * BATCH, BATCH)
        ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [RolloutError("one rollout too many"), TrainingError("not finite")])
def test_groups_that_the_learner_refuses_are_regenerated(tmp_path: Path, way: str, error: Exception) -> None:
    simulation = simulate(tmp_path, way, kind=Refuses)
    simulation.error = error  # type: ignore[attr-defined]
    session = simulation.session()
    ended_by(session, type(error), str(error))
    saved = simulate(tmp_path, way).session()
    assert saved.kept_ahead == []
    refused = set(error.refused)  # type: ignore[attr-defined]
    kinds = {item.kind for item in saved.buffer.items if item.prompt.group_index in refused}
    assert kinds == {ItemKind.RETURNED}
    resume_and_check(tmp_path, way, simulation, at=3)


class Skips(Simulation):
    """The optimizer steps of its fourth step are skipped, once too often."""

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        report = await super().train(rollout_id, groups, version)
        return replace(report, stuck="4 optimizer steps in a row") if rollout_id == 3 else report


@pytest.mark.parametrize("way", WAYS)
def test_what_was_trained_before_too_many_skipped_steps_is_saved(tmp_path: Path, way: str) -> None:
    simulation = simulate(tmp_path, way, kind=Skips)
    session, log = simulation.session(), Log()
    session.trackers = [log]
    ended_by(session, TrainingError, "4 optimizer steps in a row")
    # The skipped step is logged too: its metrics show what was wrong.
    assert log.steps == [0, 1, 2, 3]
    resume_and_check(tmp_path, way, simulation, at=4)


class Diverges(Simulation):
    """After its fourth step, weights are not finite."""

    session_of: Session

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        if rollout_id == 3:
            self.session_of.optimizer_idle.clear()
            await asyncio.sleep(self.train_s)
            raise NonfiniteWeights("step 3: weight norm is not finite. Lower --lr.")
        return await super().train(rollout_id, groups, version)


class Slow(IdleRanks):
    """A checkpoint takes the time of several steps."""

    async def written(self) -> None:
        await asyncio.sleep(12.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("async_save", "interval"), [(False, 2), (True, 3), (False, None)])
def test_weights_that_are_not_finite_are_neither_saved_nor_sent(
    tmp_path: Path, way: str, async_save: bool, interval: int | None
) -> None:
    """A checkpoint of an earlier state that is being written is finished."""
    simulation = simulate(tmp_path, way, kind=Diverges, save_interval=interval, async_save=async_save, ranks=Slow())
    simulation.session_of = session = simulation.session()  # type: ignore[attr-defined]
    with pytest.raises(NonfiniteWeights) as raised:
        run_fast(run_loop(session))
    assert session.store.steps() == ([] if interval is None else [interval])
    assert max(simulation.updated_versions) == 3
    if interval is None:
        way_back = "There is no checkpoint yet: start over with --fresh."
    else:
        checkpoint = tmp_path / f"checkpoints/step_{interval}"
        way_back = f"To continue from the last checkpoint, {checkpoint}, pass --resume {tmp_path} with it."
    assert str(raised.value) == f"step 3: weight norm is not finite. Lower --lr. {way_back}"


class Gone(TimedEngine):
    """It dies during a request, and then can neither respond nor be offloaded."""

    goes = gone = False

    async def stream(self, requests: Any) -> AsyncGenerator[Any, None]:
        self.gone = self.goes
        self._require()
        async for completion in super().stream(requests):
            yield completion

    async def pause(self) -> None:
        self._require()
        await super().pause()

    async def sleep(self, tags: Any = None) -> None:
        self._require()

    def _require(self) -> None:
        if self.gone:
            raise EngineError("engine 0 is gone")


class Loses(Simulation):
    """The engine fails when it generates for the fourth step."""

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        report = await super().train(rollout_id, groups, version)
        self.engines[0].goes = rollout_id == 2  # type: ignore[attr-defined]
        return report


def test_trained_steps_are_saved_though_an_engine_on_the_same_devices_is_lost(tmp_path: Path) -> None:
    """No health monitor runs (--no-use-fault-tolerance)."""
    engine = Gone(slots=8, rate=lambda running: 1.0, length=lambda request: 5)
    session = simulate(tmp_path, kind=Loses, engines=[engine]).session()
    session.colocation = ColocationManager(Devices(), session.client, shared=True, offload_rollout=True)
    ended_by(session, EngineError, "engine 0 is gone")
    assert session.saved_rollout_id == session.state.rollout_id == 3


class Log(Tracker):
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.steps: list[int] = []

    def start(self, run: Any) -> None: ...

    def log(self, axis: str, step: int, metrics: Any, *, rollout_id: int) -> None:
        if rollout_id == self.fails_at:
            raise StorageError("no connection")
        self.steps.append(step)

    def finish(self) -> None: ...


def test_a_step_that_a_tracker_fails_to_log_is_logged_by_others_and_not_trained_again(tmp_path: Path) -> None:
    simulation = simulate(tmp_path)
    session, log = simulation.session(), Log()
    session.trackers = [Log(fails_at=2), log, Log(fails_at=2)]
    ended_by(session, StorageError, "no connection")
    assert log.steps == [0, 1, 2]
    resume_and_check(tmp_path, "in turn", simulation, at=3)


def test_a_step_that_an_observer_fails_at_is_logged_and_not_trained_again(tmp_path: Path) -> None:
    class Observer:
        @hookimpl
        def step_trained(self, event: StepTrained) -> None:
            if event.rollout_id == 2:
                raise ValueError("no more")

    simulation = simulate(tmp_path)
    session, log = simulation.session(), Log()
    session.trackers, session.hooks = [log], Hooks({"observer/module": Observer()})
    ended_by(session, PluginError, "no more")
    assert log.steps == [0, 1, 2]
    resume_and_check(tmp_path, "in turn", simulation, at=3)


def test_a_tracker_that_fails_to_finish_does_not_hide_the_error_of_the_run() -> None:
    class Gone(Log):
        def finish(self) -> None:
            raise StorageError("no connection")

    with pytest.raises(StorageError, match="no connection"):
        finish(Gone(), None, None, None)
    error = TrainingError("not finite")
    finish(Gone(), type(error), error, None)
    assert error.__notes__ == ["Then a tracker could not be finished: no connection"]


# ---------------------------------------------------------------- steps ahead


class FirstThree(Numbers):
    """Prompts of three steps."""

    def take(self, num_prompts: int) -> list[Any]:
        return super().take(min(num_prompts, max(0, 3 * BATCH - int(self.state()["next"]))))


@pytest.mark.parametrize("save_interval", [None, 1])
@pytest.mark.parametrize("way", WAYS)
def test_the_end_of_the_data_is_reported_after_the_steps_before_it(
    tmp_path: Path, way: str, save_interval: int | None
) -> None:
    """Two steps ahead of the one that is trained, when its weights are sent to the engines or a checkpoint is due."""
    simulation = simulate(tmp_path, way, save_interval=save_interval)
    session = simulation.session()
    session.buffer.source = FirstThree()
    begun: list[int] = []

    class Observer:
        @hookimpl
        def rollout_start(self, event: RolloutStart) -> None:
            begun.append(event.rollout_id)

    session.hooks = Hooks({"observer/module": Observer()})
    ended_by(session, RolloutsExhausted, "step 3: the data has ended")
    if way != "pooled":
        assert begun == [0, 1, 2, 3]
    assert sorted(number for step in steps(simulation) for number in step) == list(range(3 * BATCH))
    assert simulate(tmp_path, way).session().state.rollout_id == 3


def stopped_when(session: Session, condition: Callable[[], object]) -> None:
    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        while not condition():  # noqa: ASYNC110 - the clock only counts
            await asyncio.sleep(1)
        session.stop_requested.set()
        await loop

    with pytest.raises(Interrupted):
        run_fast(scene())


def test_complete_steps_that_a_checkpoint_kept_outlast_another_stop(tmp_path: Path) -> None:
    """Stopped twice with complete steps ahead: the prompts of the first time are not drawn again."""
    trained = []
    for stop_after in (1, 1):
        simulation = simulate(tmp_path, "three ahead", train_s=500.0)
        stopped_when(simulation.session(), lambda there=simulation, n=stop_after: len(there.trained) == n)
        trained += steps(simulation)
        saved = simulate(tmp_path, "three ahead").session()
        assert saved.kept_ahead
    again = simulate(tmp_path, "three ahead")
    run_fast(run_loop(again.session()))
    trained += steps(again)
    assert trained == [list(range(n, n + BATCH)) for n in range(0, STEPS * BATCH, BATCH)]
