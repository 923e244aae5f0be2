"""events.jsonl: one line for each event of a fault."""

import json
from pathlib import Path

import pytest

from slime_core.contracts.hookspecs import (
    EngineLost,
    EngineRecovered,
    EngineRestarted,
    EventLoopBlocked,
    Run,
    RunEnd,
    RunReady,
    RunStart,
    SampleFailed,
    StepTrained,
    UpdateWeightsEnd,
)
from slime_core.controller.event_log import EventLog
from slime_core.errors import EngineError, StorageError
from slime_core.registry.hooks import Hooks
from slime_core.types.report import Lap, TrainReport, WeightUpdateReport
from slime_plugin_kit.scripted_rollout import prompt_of


def test_lines_have_the_fields_of_the_event_and_are_appended(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "of an attempt before"}\n')
    hooks = Hooks({"slime/events": EventLog(path)})
    run = Run(name="r", run_dir=tmp_path, config={}, attempt=2)
    hooks.emit(RunStart(run=run, rollout_id=3, version=3))
    hooks.emit(
        EngineLost(run=run, rollout_id=3, engine_index=1, error=EngineError("is gone\nlast words"), redispatched=5)
    )
    hooks.emit(EngineRestarted(run=run, rollout_id=3, engine_index=1, restarts=1, pid=4711, seconds=2.0))
    hooks.emit(EngineRecovered(run=run, rollout_id=4, engine_index=1, version=4, seconds=3.5))
    for compared_with in ("engines", None):
        report = WeightUpdateReport(version=4, seconds=0.5, bytes_sent=1, buckets=1, compared_with=compared_with)
        hooks.emit(UpdateWeightsEnd(run=run, report=report))
    hooks.emit(
        SampleFailed(run=run, prompt=prompt_of(7), sample_index=29, attempt=2, will_retry=False, error=ValueError("no"))
    )
    lap = Lap(began=7.0, seconds=2.5, parts={"train": 2.5}, spans=[("other", 0, 0.0004), ("train", 0.0004, 2.5)])
    hooks.emit(RunReady(run=run, lap=lap))
    hooks.emit(
        StepTrained(run=run, rollout_id=4, report=TrainReport(version=5, steps=(), rollout={}, perf={}), lap=lap)
    )
    hooks.emit(EventLoopBlocked(run=run, seconds=31.25, where="paced.py:9 paced"))
    hooks.emit(RunEnd(run=run, rollout_id=5, version=5))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines.pop(0) == {"event": "of an attempt before"}
    assert [line.pop("attempt") for line in lines] == [2] * 10
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    assert lines == [
        {"event": "run_start", "rollout_id": 3, "version": 3},
        {"event": "engine_lost", "rollout_id": 3, "engine": 1, "error": "EngineError: is gone\nlast words", "redispatched": 5},
        {"event": "engine_restarted", "rollout_id": 3, "engine": 1, "pid": 4711, "restarts": 1, "seconds": 2.0},
        {"event": "engine_recovered", "rollout_id": 4, "engine": 1, "version": 4, "seconds": 3.5},
        {"event": "weights_compared", "version": 4, "compared_with": "engines"},
        {"event": "sample_failed", "group": 7, "sample": 29, "tries": 2, "will_retry": False, "error": "ValueError: no"},
        {"event": "start_time", "began": 7.0, "seconds": 2.5, "spans": [["train", 0.0, 2.5]]},
        {"event": "step_time", "rollout_id": 4, "began": 7.0, "seconds": 2.5, "spans": [["train", 0.0, 2.5]]},
        {"event": "loop_held", "seconds": 31.25, "where": "paced.py:9 paced"},
        {"event": "run_end", "rollout_id": 5, "version": 5, "error": None},
    ]  # fmt: skip


def test_half_a_line_of_an_attempt_before_is_a_line_of_its_own(tmp_path):
    path, run = tmp_path / "events.jsonl", Run(name="r", run_dir=tmp_path, config={})
    for attempt in range(2):
        Hooks({"slime/events": EventLog(path)}).emit(RunStart(run=run, rollout_id=attempt, version=0))
    assert [json.loads(line)["rollout_id"] for line in path.read_text().splitlines()] == [0, 1]
    path.write_text(path.read_text() + '{"time": "20')
    Hooks({"slime/events": EventLog(path)}).emit(RunStart(run=run, rollout_id=2, version=0))
    *_, half, last = path.read_text().splitlines()
    assert (half, json.loads(last)["rollout_id"]) == ('{"time": "20', 2)


def test_a_line_that_cannot_be_written_stops_the_run_but_not_its_end():
    run = Run(name="r", run_dir=Path("/dev/full"), config={})
    hooks = Hooks({"slime/events": EventLog(Path("/dev/full"))})
    with pytest.raises(StorageError, match="/dev/full: no space left to write it"):
        hooks.emit(RunStart(run=run, rollout_id=0, version=0))
    hooks.emit(RunEnd(run=run, rollout_id=0, version=0))
