"""The loop in all its modes, with engines and a trainer that only take time: order of work, kept samples, reports."""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.contracts.filter import BufferFilter, FilterDecision, GroupFilter, Versions
from slime_core.contracts.hookspecs import GroupsFinished, hookimpl
from slime_core.contracts.tracker import Tracker
from slime_core.controller.loop import RolloutPrefetcher, run_loop
from slime_core.controller.schedule import ScheduleFile, read_schedule
from slime_core.controller.session import Session
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import ConfigError, EngineError, Interrupted, RolloutsExhausted, StorageError
from slime_core.registry.hooks import Hooks
from slime_core.types.buffer_item import BufferItem
from slime_core.types.completion import Completion, GenerateRequest
from slime_core.types.schedule import EngineEvent, EventKind
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.scripted_engine import EngineInLoop
from slime_plugin_kit.simulated_run import Numbers, Simulation
from slime_plugin_kit.timed_engine import TimedEngine
from slime_sources.pool import GroupPool
from slime_sources.pool_events import PoolEvent, PoolEventKind

SAMPLES = 2
LONG = 3
"""Every third group has a long response."""


def remaining_length(request: Any) -> int:
    """Tokens that are left of a response: 10 for most, 45 for the second sample of every third group."""
    number = int(request.request_id.split("/")[1])
    whole = 45 if number // SAMPLES % LONG == 0 and number % SAMPLES else 10
    return whole - (len(request.token_ids) - 1)


def simulate(folder: Path, *, steps: int = 6, **changes: Any) -> Simulation:
    """Four groups of two a step; a token takes a second."""
    rollout = {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": SAMPLES,
        "rollout_max_response_len": 100,
        **changes.pop("rollout", {}),
    }
    given = {"train_s": 5.0, "engines": [TimedEngine(slots=8, rate=lambda running: 1.0, length=remaining_length)]}
    return Simulation(folder=folder, num_rollout=steps, rollout=rollout, **given | changes)


def run(simulation: Simulation) -> Session:
    session = simulation.session()
    run_fast(run_loop(session))
    return session


def group_numbers(simulation: Simulation) -> list[int]:
    return [group.group_index for _, groups in simulation.trained for group in groups]


def samples_of(simulation: Simulation) -> list[tuple[int, Any]]:
    return [(version, s) for version, groups in simulation.trained for group in groups for s in group.samples]


def staleness(simulation: Simulation) -> list[int]:
    return [version - sample.oldest_version(version) for version, sample in samples_of(simulation)]


def require_whole(simulation: Simulation) -> None:
    """Every response is there once, as long as it should be, with tokens that follow each other and spans that cover it."""
    indices = [sample.index for _, sample in samples_of(simulation)]
    assert len(set(indices)) == len(indices)
    for _, sample in samples_of(simulation):
        number = sample.index
        long = number // SAMPLES % LONG == 0 and number % SAMPLES
        assert sample.response_length == (45 if long else 10)
        steps = np.diff(sample.response_tokens.astype(np.int64))
        assert set(np.unique(steps % 97)) <= {1}, "a response that was broken off does not continue where it was"
        covered = [place for _, start, end in sample.spans for place in range(start, end)]
        assert covered == list(range(sample.response_length))


def waiting(session: Session) -> list[int]:
    return [item.prompt.group_index for item in session.buffer.items]


# ---------------------------------------------------------------- what runs when


def test_in_turn_and_one_step_ahead(tmp_path: Path) -> None:
    """45 seconds of generation and 5 of training: in turn they add up, one step ahead the longer one counts."""
    in_turn, ahead = simulate(tmp_path / "0"), simulate(tmp_path / "1", rollout={"max_async_level": 1})
    for simulation in (in_turn, ahead):
        run(simulation)
        assert group_numbers(simulation) == list(range(24))
        require_whole(simulation)
    assert np.diff(in_turn.trained_at).tolist() == [50.0] * 5
    assert np.diff(ahead.trained_at).tolist() == [45.0] * 5
    assert set(staleness(in_turn)) == {0}
    assert set(staleness(ahead)) == {0, 1}
    # A weight update waits for the rollouts, so every response has one version.
    assert {len(sample.spans) for _, sample in samples_of(ahead)} == {1}


def test_fully_asynchronous_mode_does_not_wait_for_slow_groups(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, steps=9, rollout={"max_async_level": 2})
    run(simulation)
    require_whole(simulation)
    # 8 slots write 8 tokens a second; a step of 4 groups has about 127.
    assert np.median(np.diff(simulation.trained_at)) < 25
    assert group_numbers(simulation) != sorted(group_numbers(simulation))
    # In a batch they stand in the order in which they were submitted.
    for _, groups in simulation.trained:
        assert [g.group_index for g in groups] == sorted(g.group_index for g in groups)
    assert max(staleness(simulation)) <= 2
    # Weights came while responses were under way.
    assert max(len(sample.spans) for _, sample in samples_of(simulation)) > 1
    assert simulation.updated_versions == list(range(10))


@pytest.mark.parametrize(("ahead", "wave"), [(1, 4), (2, 4), (3, 6)])
def test_admission_is_bounded(tmp_path: Path, ahead: int, wave: int) -> None:
    """accepted + running <= (ahead + version + 1) x batch at any time, beside what over-sampling allows."""
    simulation = simulate(
        tmp_path,
        train_s=500.0,
        engines=[TimedEngine(slots=1000, rate=lambda running: 1.0, length=remaining_length)],
        rollout={"max_async_level": ahead, "update_weights_in_flight": True, "over_sampling_batch_size": wave},
    )
    session = simulation.session()
    most = 0

    async def scene() -> None:
        nonlocal most
        loop = asyncio.create_task(run_loop(session))
        while not loop.done():
            await asyncio.sleep(1)
            drawn = session.buffer.source.state()["next"] - len(session.buffer)
            bound = min(ahead + session.state.version + 1, session.num_rollout) * 4 + wave - 4
            assert drawn <= bound
            most = max(most, drawn)
        await loop

    run_fast(scene())
    assert most >= min(ahead + 3, 6) * 4
    require_whole(simulation)


@pytest.mark.parametrize("mode", ["in turn", "one ahead", "fully asynchronous", "partial", "asynchronous and partial"])
def test_a_stalled_trainer_bounds_the_waiting_groups(tmp_path: Path, mode: str) -> None:
    """Whatever is drawn from the data is in the buffer, under way, collected or trained: engines that are much faster than
    the trainer draw no more than the steps under way take, and over-sampling, however long they wait."""
    rollout = {"over_sampling_batch_size": 8, **MODES[mode]}
    simulation = simulate(
        tmp_path,
        steps=12,
        train_s=1000.0,
        save_interval=5,
        engines=[TimedEngine(slots=1000, rate=lambda running: 1.0, length=remaining_length)],
        rollout=rollout,
    )
    session = simulation.session()
    held = []

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        while not loop.done():
            await asyncio.sleep(7)
            held.append(session.buffer.source.state()["next"] - 4 * session.state.version)
        await loop

    run_fast(scene())
    assert len(held) > 1000
    assert max(held) <= 4 * (rollout.get("max_async_level", 0) + 1) + rollout["over_sampling_batch_size"] - 4


def test_weights_every_second_step(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, rollout={"max_async_level": 2}, update_weights_interval=2)
    run(simulation)
    assert simulation.updated_versions == [0, 2, 4, 6]
    versions = {span.version for _, sample in samples_of(simulation) for span in sample.spans}
    assert versions <= {0, 2, 4}
    assert max(staleness(simulation)) <= 3


class Odd(GroupFilter):
    def decide(self, group: Any) -> FilterDecision:
        return FilterDecision(keep=group.group_index % 2 == 1, reason="even")


def test_rejected_groups_do_not_count(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, steps=4, filters=[Odd()], rollout={"max_async_level": 2})
    run(simulation)
    assert len(group_numbers(simulation)) == 16
    assert all(number % 2 for number in group_numbers(simulation))


@pytest.mark.parametrize("ahead", [0, 2])
def test_observers_of_rejected_groups_get_each_group_once(tmp_path: Path, ahead: int) -> None:
    """Checkpoints break steps off in which some have been rejected already."""
    seen: list[int] = []

    class Observer:
        @hookimpl
        def groups_finished(self, event: GroupsFinished) -> None:
            seen.extend(rejected.group.group_index for rejected in event.rejected)
            seen.extend(group.group_index for group in event.accepted)

    rollout = {"max_async_level": ahead, "partial_rollout": True}
    simulation = simulate(tmp_path, steps=6, train_s=32.0, filters=[Odd()], save_interval=1, rollout=rollout)
    session = simulation.session()
    session.hooks = Hooks({"observer/module": Observer()})
    run_fast(run_loop(session))
    drawn = session.buffer.source.state()["next"]
    assert sorted([*seen, *waiting(session)]) == list(range(drawn))
    assert [number for number in seen if number % 2] == group_numbers(simulation)


class Never(GroupFilter):
    def decide(self, group: Any) -> FilterDecision:
        return FilterDecision(keep=False, reason="never")


def test_exhausted_rollouts_end_it(tmp_path: Path) -> None:
    with pytest.raises(RolloutsExhausted, match=r"step 0: 40 groups were rejected .*never 40"):
        run(simulate(tmp_path, filters=[Never()], rollout={"max_async_level": 3}))


# ---------------------------------------------------------------- what is stale


class Log(Tracker):
    """What is logged, and its sums."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()
        self.lines: list[tuple[str, int, Any]] = []

    def start(self, run: Any) -> None: ...

    def log(self, axis: str, step: int, metrics: Any, *, rollout_id: int) -> None:
        self.lines.append((axis, step, metrics))
        self.sums.update({name: int(value) for name, value in metrics.items()})

    def finish(self) -> None: ...


def test_stale_groups_are_generated_again_dropped_or_masked(tmp_path: Path) -> None:
    for way in ("requeue", "drop", "mask_old_spans"):
        simulation = simulate(
            tmp_path / way,
            steps=8,
            train_s=1.0,
            rollout={
                "max_async_level": 1,
                "update_weights_in_flight": True,
                "on_stale": way,
                "over_sampling_batch_size": 12,
            },
            engines=[TimedEngine(slots=24, rate=lambda running: 1.0, length=remaining_length)],
        )
        session = simulation.session()
        log = Log()
        session.trackers = [log]
        run_fast(run_loop(session))
        counts = log.sums
        stale = {name: number for name, number in counts.items() if name.startswith("rollout/stale/")}
        trained = [
            version - v
            for version, sample in samples_of(simulation)
            for v, start, end in sample.spans
            if sample.loss_mask[start:end].any()
        ]
        assert max(trained) <= 1, way
        if way == "requeue":
            assert stale["rollout/stale/requeued_groups"] > 0
            require_whole(simulation)
        elif way == "drop":
            assert stale["rollout/stale/dropped_groups"] > 0
        else:
            lost = sum(int((sample.loss_mask == 0).sum()) for _, sample in samples_of(simulation))
            assert stale["rollout/stale/masked_tokens"] == lost > 0
            require_whole(simulation)


# ---------------------------------------------------------------- partial rollouts


def partial(folder: Path, **changes: Any) -> Simulation:
    rollout = {
        "partial_rollout": True,
        "over_sampling_batch_size": 8,
        "max_staleness": 9,
        **changes.pop("rollout", {}),
    }
    engine = TimedEngine(slots=16, rate=lambda running: 1.0, length=remaining_length)
    return simulate(folder, engines=[engine], rollout=rollout, **changes)


def test_partial_rollouts_continue_in_a_later_step(tmp_path: Path) -> None:
    simulation = partial(tmp_path, steps=7)
    session = run(simulation)
    require_whole(simulation)
    broken = [sample for _, sample in samples_of(simulation) if len(sample.spans) > 1]
    assert broken, "nothing was broken off"
    # No token was written twice, and no group was lost.
    kept = sum(sample.response_length for item in session.buffer.items for sample in item.samples)
    assert simulation.engines[0].tokens_written == sum(s.response_length for _, s in samples_of(simulation)) + kept
    drawn = session.buffer.source.state()["next"]
    assert sorted([*group_numbers(simulation), *waiting(session)]) == list(range(drawn))
    # No step waits for the longest response: steps of 4 groups among 8 take 10 seconds and 5 of training.
    assert np.diff(simulation.trained_at).mean() < 30


def test_old_spans_of_partial_rollouts_may_be_masked(tmp_path: Path) -> None:
    simulation = partial(tmp_path, steps=7, rollout={"mask_offpolicy_in_partial_rollout": True})
    run(simulation)
    masked = 0
    for _, sample in samples_of(simulation):
        newest = max(span.version for span in sample.spans)
        for version, start, end in sample.spans:
            assert set(sample.loss_mask[start:end]) == {version == newest}
            masked += version < newest
    assert masked


@pytest.mark.parametrize("keeps", [True, False])
def test_finished_surplus_waits_for_the_next_step_if_it_may_be_stale(tmp_path: Path, keeps: bool) -> None:
    """Three of four responses take 10 seconds: more groups than are requested finish at the same time."""
    simulation = partial(tmp_path, steps=1, rollout={"partial_rollout": keeps, "max_staleness": int(keeps)})
    session = simulation.session()
    if not keeps:
        from slime_sources.plugin import PoolDriver

        session.collector = PoolDriver.build(None)
    run_fast(run_loop(session))
    kinds = Counter(str(item.kind) for item in session.buffer.items)
    assert kinds == ({"surplus": 1, "partial": 3} if keeps else {"returned": 4})


# ---------------------------------------------------------------- checkpoints


class Died(Exception):
    """Simulates SIGKILL: nothing of the process is left."""


def run_and_die(simulation: Simulation, after_s: float) -> Session:
    """Ends without any cleanup; the next session has only the checkpoints."""
    session = simulation.session()

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        await asyncio.wait({loop}, timeout=after_s)
        if loop.done():
            return loop.result()
        # What the loop does on its way out no longer reaches the disk.
        session.store = None  # type: ignore[assignment]
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        raise Died

    run_fast(scene())
    return session


MODES: dict[str, dict[str, Any]] = {
    "in turn": {},
    "one ahead": {"max_async_level": 1},
    "fully asynchronous": {"max_async_level": 2},
    "partial": {"partial_rollout": True, "max_staleness": 9, "over_sampling_batch_size": 8},
    "asynchronous and partial": {
        "max_async_level": 2,
        "partial_rollout": True,
        "max_staleness": 9,
        "over_sampling_batch_size": 6,
    },
}


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_loses_no_prompt_and_trains_none_twice(tmp_path: Path, mode: str) -> None:
    """Killed every 37 seconds of its clock, which is between and within all that it does."""
    trained: dict[int, list[Any]] = {}
    steps, deaths = 9, 0
    for attempt in itertools.count():
        simulation = simulate(tmp_path, steps=steps, save_interval=2, update_weights_s=1.0, rollout=MODES[mode])
        session = simulation.session()
        first = session.state.rollout_id
        try:
            session = run_and_die(simulation, 37.0 + 20 * attempt)
        except Died:
            deaths += 1
            trained |= dict(enumerate((groups for _, groups in simulation.trained), first))
            continue
        trained |= dict(enumerate((groups for _, groups in simulation.trained), first))
        break
    assert deaths >= 2
    simulation.trained = [(step, trained[step]) for step in range(steps)]
    require_whole(simulation)
    drawn = session.buffer.source.state()["next"]
    assert sorted([*group_numbers(simulation), *waiting(session)]) == list(range(drawn))


def test_a_checkpoint_keeps_tokens_versions_and_log_probs(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, steps=9, save_interval=2, rollout={"max_async_level": 2, "max_staleness": 9})
    with pytest.raises(Died):
        run_and_die(simulation, 75)
    session = simulation.session()
    items = session.buffer.items
    assert {str(item.kind) for item in items} >= {"partial"}
    for item in items:
        for sample in item.samples:
            assert sum(end - start for _, start, end in sample.spans) == sample.response_length
            assert (sample.rollout_log_probs == -0.5).all()
            assert item.start_rollout_id is not None
    written = sum(sample.response_length for item in items for sample in item.samples)
    again = simulate(tmp_path, steps=9, save_interval=2, rollout={"max_async_level": 2, "max_staleness": 9})
    run(again)
    require_whole(again)
    kept_ahead = sum(s.response_length for groups in session.kept_ahead for g in groups for s in g.samples)
    trained = sum(sample.response_length for _, sample in samples_of(again))
    assert again.engines[0].tokens_written == trained - written - kept_ahead


def test_a_stop_is_heeded_while_a_step_ahead_is_waited_for(tmp_path: Path) -> None:
    """Weights are updated when the step that runs beside the training has ended, in 45 seconds."""
    simulation = simulate(tmp_path, rollout={"max_async_level": 1})
    session = simulation.session()

    async def scene() -> float:
        loop = asyncio.create_task(run_loop(session))
        while len(simulation.trained) < 2:  # noqa: ASYNC110 - the clock only counts
            await asyncio.sleep(1)
        # Trained: what is waited for now is the step ahead.
        await asyncio.sleep(6)
        assert session.state.rollout_id == 2
        began = asyncio.get_running_loop().time()
        session.stop_requested.set()
        with pytest.raises(Interrupted, match="while generating"):
            await loop
        return asyncio.get_running_loop().time() - began

    assert run_fast(scene()) < 5
    assert simulate(tmp_path, rollout={"max_async_level": 1}).session().state.rollout_id == 2


def test_an_interrupted_asynchronous_run_keeps_what_it_has(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, steps=9, rollout={"max_async_level": 2})
    session = simulation.session()

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        await asyncio.sleep(75)
        session.stop_requested.set()
        await loop

    with pytest.raises(Interrupted):
        run_fast(scene())
    done = len(simulation.trained)
    assert 0 < done < 9
    again = simulate(tmp_path, steps=9, rollout={"max_async_level": 2})
    resumed = again.session()
    assert resumed.state.rollout_id == done
    assert any(item.samples for item in resumed.buffer.items)
    run_fast(run_loop(resumed))
    again.trained = [*simulation.trained, *again.trained]
    require_whole(again)
    drawn = resumed.buffer.source.state()["next"]
    assert sorted([*group_numbers(again), *waiting(resumed)]) == list(range(drawn))


# ---------------------------------------------------------------- evaluation beside it, engines that are lost


class FirstThree(Numbers):
    """Prompts of three steps."""

    def take(self, num_prompts: int) -> list[Any]:
        return super().take(min(num_prompts, max(0, 12 - int(self.state()["next"]))))


def test_the_report_of_an_early_end_is_of_its_weights(tmp_path: Path) -> None:
    """The evaluation that was due after the last step runs on the side when the data turns out to have ended."""
    simulation = simulate(
        tmp_path,
        steps=9,
        eval_prompts=4,
        eval={"async_eval": True, "eval_interval": 1},
        rollout={"on_exhausted": "finish"},
    )
    session = simulation.session()
    session.buffer.source = FirstThree()
    run_fast(run_loop(session))
    assert session.ended_early
    assert session.state.rollout_id == 3
    assert session.last_eval is not None
    assert session.last_eval.rollout_id == 2
    assert (session.last_eval.metrics["eval/version_min"], session.last_eval.metrics["eval/version_max"]) == (3, 3)


@pytest.mark.parametrize("holds_weights", [True, False])
def test_a_cancelled_concurrent_evaluation_is_repeated_when_the_run_resumes(
    tmp_path: Path, holds_weights: bool
) -> None:
    """Ctrl-C comes when the step after it is trained: while its weight update waits for the evaluation, or in a rollout."""
    length = {"eval-held_out": 500, "train": 10}

    def simulation() -> Simulation:
        return simulate(
            tmp_path,
            eval_prompts=2,
            eval={"async_eval": True, "eval_blocks_weight_update": holds_weights, "eval_interval": 2},
            engines=[
                TimedEngine(slots=100, rate=lambda running: 1.0, length=lambda r: length[r.request_id.split("/")[0]])
            ],
        )

    def logging(session: Session) -> Log:
        log = Log()
        session.trackers = [log]
        return log

    def evaluated(log: Log) -> list[tuple[int, float, float]]:
        return [
            (step, metrics["eval/version_min"], metrics["eval/version_max"])
            for axis, step, metrics in log.lines
            if axis == "eval/step"
        ]

    broken_off = simulation().session()
    log = logging(broken_off)

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(broken_off))
        # Ten seconds of rollouts and five of training a step.
        await asyncio.sleep(50)
        broken_off.stop_requested.set()
        await loop

    with pytest.raises(Interrupted):
        run_fast(scene())
    assert evaluated(log) == []
    resumed = simulation().session()
    at = resumed.state.rollout_id
    assert at == 3
    log = logging(resumed)
    run_fast(run_loop(resumed))
    assert [step for step, *_ in evaluated(log)] == [at, 4, 6]
    assert evaluated(log)[0][1] == at
    assert not resumed.state.eval_owed


def test_an_extended_run_evaluates_its_former_last_step_again(tmp_path: Path) -> None:
    """Every second step is evaluated, and the third was the last: its record is dropped with what follows a checkpoint."""
    asked = {"eval_prompts": 2, "engines": [TimedEngine(slots=100, rate=lambda running: 1.0, length=lambda r: 10)]}
    run_fast(run_loop(simulate(tmp_path, steps=3, **asked).session()))
    longer = simulate(tmp_path, steps=4, **asked).session()
    log = Log()
    longer.trackers = [log]
    run_fast(run_loop(longer))
    assert [step for axis, step, _ in log.lines if axis == "eval/step"] == [3, 4]


@pytest.mark.parametrize(
    ("eval_table", "ahead"),
    [({}, 0), ({"async_eval": True}, 0), ({"async_eval": True, "eval_blocks_weight_update": False}, 2)],
)
def test_evaluation_waits_continues_beside_the_run_or_lets_weights_through(
    tmp_path: Path, eval_table: dict[str, Any], ahead: int
) -> None:
    simulation = simulate(
        tmp_path,
        train_s=20.0,
        eval_prompts=12,
        eval=eval_table,
        rollout={"max_async_level": ahead},
        engines=[TimedEngine(slots=100, rate=lambda running: 1.0, length=remaining_length)],
    )
    session = simulation.session()
    log = Log()
    session.trackers = [log]
    run_fast(run_loop(session))
    require_whole(simulation)
    evaluations = [(step, metrics) for axis, step, metrics in log.lines if axis == "eval/step"]
    # After every second step, whatever else continues, with a response to every prompt.
    assert [step for step, _ in evaluations] == [2, 4, 6]
    assert all(metrics["eval/held_out/response_len/max"] == 45 for _, metrics in evaluations)
    versions = [(metrics["eval/version_min"], metrics["eval/version_max"]) for _, metrics in evaluations]
    if eval_table.get("eval_blocks_weight_update", True):
        assert versions == [(2, 2), (4, 4), (6, 6)]
    else:
        assert versions[0][0] == 2
        assert versions[0][1] > 2
    # In turn: 45 seconds of rollouts and 20 of training, and 45 of evaluation before the next step, or beside it.
    if ahead == 0:
        pauses = np.diff(simulation.trained_at).tolist()
        assert pauses == [65.0, 65.0 if eval_table else 110.0] * 2 + [65.0]


@pytest.mark.parametrize("mode", ["fully asynchronous", "asynchronous and partial"])
def test_an_engine_that_is_lost_in_flight_loses_nothing(tmp_path: Path, mode: str) -> None:
    engines = [TimedEngine(slots=4, rate=lambda running: 1.0, length=remaining_length) for _ in range(2)]
    simulation = simulate(
        tmp_path, steps=9, engines=engines, save_interval=4, update_weights_s=1.0, rollout=MODES[mode]
    )
    session = simulation.session()
    assert session.client is not None
    client, lost = session.client, []
    client.watch(lambda index, error, again: lost.append(again))

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        for after_s, back_s in ((7.0, 3.0), (23.0, 11.0)):
            await asyncio.sleep(after_s)
            client.quarantine(1, EngineError("it is gone"))
            await asyncio.sleep(back_s)
            successor = TimedEngine(
                slots=4, rate=lambda running: 1.0, length=remaining_length, version=session.state.version
            )
            client.admit(1, EngineInLoop(successor))
        await loop

    run_fast(scene())
    assert lost[0] > 0
    require_whole(simulation)
    drawn = session.buffer.source.state()["next"]
    assert sorted([*group_numbers(simulation), *waiting(session)]) == list(range(drawn))


class NewestPrompts(BufferFilter):
    """What was drawn last goes first."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, Versions]] = []

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        self.asked.append((len(items), num_groups, versions))
        assert versions.oldest == tuple(item.oldest_version for item in items)
        newest = sorted(range(len(items)), key=lambda place: -items[place].prompt.group_index)
        # It need not choose them all.
        return newest[: min(num_groups, 3)]


def test_a_buffer_filter_chooses_among_finished_groups_too(tmp_path: Path) -> None:
    """Training takes longer than generation, so that all the steps under way have finished when the next one is taken."""
    chosen = NewestPrompts()
    simulation = simulate(
        tmp_path, train_s=300.0, rollout={"max_async_level": 2, "max_staleness": 9}, buffer_filter=chosen
    )
    session = simulation.session()
    run_fast(run_loop(session))
    assert [(versions.trained, versions.max_staleness) for *_, versions in chosen.asked] == [(n, 9) for n in range(6)]
    # The first step is taken as soon as it can be; then there are always two, of which the last has no other behind it.
    assert [(there, expected) for there, expected, _ in chosen.asked] == [(4, 4), *[(8, 4)] * 4, (4, 4)]
    assert chosen.asked[2][2].oldest == (0,) * 4 + (1,) * 4
    # The three newest, and of the others the one that finished first: 0, 3, 6 … are long.
    numbers = [[group.group_index for group in groups] for _, groups in simulation.trained]
    assert numbers == [[1, 2, 4, 5], [7, 9, 10, 11], [8, 13, 14, 15], [0, 17, 18, 19], [3, 21, 22, 23], [6, 12, 16, 20]]
    require_whole(simulation)
    drawn = session.buffer.source.state()["next"]
    assert sorted([*group_numbers(simulation), *waiting(session)]) == list(range(drawn))


def heard_by(session: Session) -> list[PoolEvent]:
    """By its pool, since it was last written to the schedule."""
    assert isinstance(session.collector, GroupPool)
    return session.collector.record.heard


@pytest.mark.parametrize("buffer_filter", [PopFirstFilter, NewestPrompts])
@pytest.mark.parametrize("mode", ["fully asynchronous", "partial", "asynchronous and partial"])
def test_a_recorded_order_is_followed_whatever_the_durations(
    tmp_path: Path, mode: str, buffer_filter: Callable[[], BufferFilter]
) -> None:
    def batches(name: str, script: Sequence[PoolEvent], **changes: Any) -> tuple[list[list[int]], list[PoolEvent]]:
        simulation = simulate(
            tmp_path / name,
            steps=9,
            save_interval=3,
            rollout=MODES[mode] | {"max_staleness": 99},
            buffer_filter=buffer_filter(),
            **changes,
        )
        session = simulation.session()
        session.collector.replay_events(script)
        run_fast(run_loop(session))
        return [[g.group_index for g in groups] for _, groups in simulation.trained], heard_by(session)

    slower = {"train_s": 33.0, "update_weights_s": 2.0}
    trained, heard = batches("recorded", [])
    repeated, again = batches("repeated", heard, **slower)
    assert repeated == trained
    assert again == heard
    if mode != "partial":
        assert batches("free", [], **slower)[0] != trained


def test_a_schedule_is_cut_at_the_checkpoint_that_a_run_resumes_from(tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    first, second = EngineEvent(0, EventKind.SUBMIT, ("a", "b")), EngineEvent(7, EventKind.VERSION, version=1)
    this = {"train": {"lr": 1.0, "num_rollout": 6}, "plugins": {"engine": "local"}}
    schedule = ScheduleFile(path, this, resumed_at=None)
    schedule.checkpoint(
        2, {0: [first]}, [PoolEvent(PoolEventKind.STEP, 0), PoolEvent(PoolEventKind.GIVE_BACK, ended=(3,))]
    )
    schedule.checkpoint(4, {0: [second]}, [])
    # Killed, and the checkpoint of step 4 was not complete.
    schedule = ScheduleFile(path, this, resumed_at=2)
    schedule.checkpoint(4, {0: [second], 1: [first]}, [PoolEvent(PoolEventKind.STEP, 1)])
    found = read_schedule(path, this)
    assert found.engines == {0: [first, EngineEvent(0, EventKind.RESTART), second], 1: [first]}
    assert found.requests == [{"a": [0], "b": [0]}, {"a": [1], "b": [1]}]
    assert found.pool == [["step", 0, [], []], ["give_back", -1, [3], []], ["step", 1, [], []]]
    other = {"train": {"lr": 2.0, "num_rollout": 6}, "plugins": {"engine": "sglang"}}
    with pytest.raises(
        ConfigError, match=r"plugins.engine: 'local' -> 'sglang'; train.lr: 1.0 -> 2.0. Start with those"
    ):
        read_schedule(path, other)
    schedule.checkpoint(5, {}, [], broken="an engine was lost")
    with pytest.raises(ConfigError, match="cannot be repeated beyond step 5: an engine was lost"):
        read_schedule(path, this)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_schedule(tmp_path / "none.jsonl", this)
    # Resumed with more steps, which a run may: but no single run does what the two did together.
    ScheduleFile(path, {**this, "train": {"lr": 1.0, "num_rollout": 9}}, resumed_at=4)
    with pytest.raises(ConfigError, match=r"beyond step 4: .* other settings \(train.num_rollout: 6 -> 9\)"):
        read_schedule(path, this)


def test_a_schedule_that_does_not_reach_the_checkpoint_cannot_be_repeated(tmp_path: Path) -> None:
    """It was cut short, or is not there: what comes after is not all."""
    path = tmp_path / "schedule.jsonl"
    schedule = ScheduleFile(path, {}, resumed_at=None)
    schedule.checkpoint(2, {}, [PoolEvent(PoolEventKind.STEP, 0)])
    for _ in range(2):
        schedule = ScheduleFile(path, {}, resumed_at=4)
        schedule.checkpoint(6, {}, [])
        with pytest.raises(
            ConfigError,
            match="beyond step 4: there the run was resumed, and its schedule up to that checkpoint is missing",
        ):
            read_schedule(path, {})
        path.unlink()


def test_a_schedule_that_cannot_be_cut_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "schedule.jsonl"
    ScheduleFile(path, {}, resumed_at=None).checkpoint(2, {}, [PoolEvent(PoolEventKind.STEP, 0)])
    before, write = path.read_text(), Path.write_text

    def full(file: Path, text: str, **options: Any) -> int:
        write(file, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageError, match="no space left"):
        ScheduleFile(path, {}, resumed_at=2)
    assert path.read_text() == before


def test_a_replay_ends_with_the_last_checkpoint(tmp_path: Path) -> None:
    """A killed run has written down more, the last of it in part."""
    path = tmp_path / "schedule.jsonl"
    events = [EngineEvent(at, EventKind.SUBMIT, (f"r{at}",)) for at in range(4)]
    schedule = ScheduleFile(path, {}, resumed_at=None)
    schedule.add({0: events[:1]}, [PoolEvent(PoolEventKind.STEP, 0)])
    assert read_schedule(path, {}).engines == {}
    schedule.add({0: [], 1: []}, [])
    schedule.checkpoint(2, {0: events[1:2]}, [])
    schedule.add({0: events[2:3]}, [PoolEvent(PoolEventKind.STEP, 1)])
    with path.open("a") as file:
        file.write('{"engine": 0, "ev')
    found = read_schedule(path, {})
    assert (found.engines, found.pool) == ({0: events[:2]}, [["step", 0, [], []]])
    assert found.requests == [{"r0": [0], "r1": [0]}]
    ScheduleFile(path, {}, resumed_at=2).checkpoint(3, {0: events[3:]}, [])
    assert read_schedule(path, {}).engines[0] == [*events[:2], EngineEvent(0, EventKind.RESTART), events[3]]


class Remembering(TimedEngine):
    """Keeps what came to it until it is asked."""

    def __init__(self) -> None:
        super().__init__(slots=8, rate=lambda running: 1.0, length=remaining_length)
        self.kept: list[EngineEvent] = []

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Completion, None]:
        self.kept.append(EngineEvent(0, EventKind.SUBMIT, tuple(request.request_id for request in requests)))
        async for completion in super().stream(requests):
            yield completion

    async def drain_events(self) -> Sequence[EngineEvent]:
        kept, self.kept = self.kept, []
        return kept


@pytest.mark.parametrize("loses", [False, True])
def test_recorded_events_leave_memory_with_their_step(tmp_path: Path, loses: bool) -> None:
    """In a run of 40 steps without a checkpoint before the end. Once an engine was lost, it is thrown away."""
    heard, path = [], tmp_path / "schedule.jsonl"
    engine, free = Remembering(), Remembering()
    whole = simulate(tmp_path / "free", steps=40, rollout=MODES["fully asynchronous"], engines=[free])
    at_once = whole.session()
    run_fast(run_loop(at_once))

    def look(version: int, groups: Sequence[Any]) -> None:
        heard.append((len(heard_by(session)), len(engine.kept)))

    simulation = simulate(
        tmp_path / "kept", steps=40, rollout=MODES["fully asynchronous"], engines=[engine], observe=look
    )
    session = simulation.session()
    assert session.client is not None
    session.schedule = ScheduleFile(path, {}, resumed_at=None)
    session.client.num_lost = int(loses)
    run_fast(run_loop(session))
    assert max(pool for pool, _ in heard) < len(heard_by(at_once)) / 10
    assert max(kept for _, kept in heard) < len(free.kept) / 10
    if loses:
        assert "events" not in path.read_text()
        return
    found = read_schedule(path, {})
    following = GroupPool()
    following.replay_events(found.pool)
    assert [*following.record.script, *heard_by(session)] == heard_by(at_once)
    assert found.engines == {0: free.kept}


@pytest.mark.parametrize("cause", ["stop", "error"])
def test_a_replay_without_further_events_ends(tmp_path: Path, cause: str) -> None:
    """Before its checkpoint group 999 is expected, which never comes."""

    def simulation(name: str) -> Simulation:
        return simulate(tmp_path / name, steps=9, save_interval=3, rollout=MODES["fully asynchronous"])

    recorded = simulation("recorded").session()
    run_fast(run_loop(recorded))
    heard = heard_by(recorded)
    place = next(place for place, news in enumerate(heard) if news.kind is PoolEventKind.GIVE_BACK)
    repeated = simulation("repeated")
    session = repeated.session()
    session.collector.replay_events([*heard[:place], PoolEvent(PoolEventKind.GROUP, 999), *heard[place:]])
    client = session.client
    assert client is not None

    async def scene() -> None:
        loop = asyncio.create_task(run_loop(session))
        while len(repeated.trained) < 3:  # noqa: ASYNC110 - the clock only counts
            await asyncio.sleep(1)
        if cause == "stop":
            session.stop_requested.set()
        else:
            client.fail(EngineError("they are gone"))
        await loop

    with pytest.raises(Interrupted if cause == "stop" else EngineError):
        run_fast(scene())


def test_steps_ahead_are_collected_one_after_the_other_without_a_pool(tmp_path: Path) -> None:
    simulation = simulate(tmp_path, rollout={"max_async_level": 3, "update_weights_in_flight": False})
    session = simulation.session()
    schedule = RolloutPrefetcher(session)
    assert not schedule.pooled
    run_fast(run_loop(session))
    assert group_numbers(simulation) == list(range(24))
    assert max(staleness(simulation)) <= 3
