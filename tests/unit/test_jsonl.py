"""metrics.jsonl: whole lines only, and never one of a step that is done again."""

import json

import pytest

from slime_core.contracts.tracker import RunInfo
from slime_core.controller.jsonl import JsonlTracker


def started(folder, *, attempt=1, resumed_at=None):
    tracker = JsonlTracker()
    tracker.start(RunInfo(name="a", run_dir=folder, config={}, attempt=attempt, resumed_at=resumed_at))
    return tracker


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def record(folder, *, steps, evals=()):
    tracker = started(folder)
    for step in steps:
        tracker.log("train/step", 2 * step, {"train/loss": 0.5}, rollout_id=step)
        tracker.log("train/step", 2 * step + 1, {"train/loss": 0.25}, rollout_id=step)
        tracker.log("rollout/step", step, {"rollout/raw_reward": 1.0}, rollout_id=step)
        if step in evals:
            tracker.log("eval/step", step + 1, {"eval/x": 1.0}, rollout_id=step)
    return tracker


def test_a_line_has_the_metrics_the_time_and_the_attempt(tmp_path):
    tracker = started(tmp_path)
    tracker.log("train/step", 7, {"train/loss": 0.5, "train/é": 1.0}, rollout_id=3)
    # Before the end: a killed run keeps what it has logged.
    assert lines(tmp_path) == [
        {
            "axis": "train/step",
            "step": 7,
            "rollout_id": 3,
            "attempt": 1,
            "metrics": {"train/loss": 0.5, "train/é": 1.0},
        }
    ]
    tracker.finish()
    tracker.finish()


def test_a_resumed_run_truncates_the_lines_after_its_checkpoint(tmp_path):
    record(tmp_path, steps=range(4)).finish()
    again = started(tmp_path, attempt=2, resumed_at=2)
    again.log("rollout/step", 2, {"rollout/raw_reward": 2.0}, rollout_id=2)
    again.finish()
    found = lines(tmp_path)
    assert [(line["axis"], line["step"], line["attempt"]) for line in found] == [
        ("train/step", 0, 1),
        ("train/step", 1, 1),
        ("rollout/step", 0, 1),
        ("train/step", 2, 1),
        ("train/step", 3, 1),
        ("rollout/step", 1, 1),
        ("rollout/step", 2, 2),
    ]


def test_the_evaluation_that_follows_the_checkpoint_is_done_again(tmp_path):
    tracker = started(tmp_path)
    tracker.log("eval/step", 0, {"eval/x": 0.0}, rollout_id=-1)
    tracker.finish()
    tracker = started(tmp_path, attempt=2, resumed_at=0)
    assert lines(tmp_path) == []
    for step in range(3):
        tracker.log("rollout/step", step, {}, rollout_id=step)
        tracker.log("eval/step", step + 1, {}, rollout_id=step)
    tracker.finish()
    started(tmp_path, attempt=3, resumed_at=2).finish()
    assert [(line["axis"], line["step"]) for line in lines(tmp_path)] == [
        ("rollout/step", 0),
        ("eval/step", 1),
        ("rollout/step", 1),
    ]


@pytest.mark.parametrize("half", ['{"axis": "rollout/st', '{"axis": "rollout/step", "rollout_id": 0}'])
def test_a_last_line_that_was_being_written_is_dropped(tmp_path, half):
    record(tmp_path, steps=[0]).finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    tracker = started(tmp_path, attempt=2, resumed_at=1)
    tracker.log("rollout/step", 1, {}, rollout_id=1)
    tracker.finish()
    assert [line["rollout_id"] for line in lines(tmp_path)] == [0, 0, 0, 1]


def test_a_first_start_truncates_the_file(tmp_path):
    record(tmp_path, steps=[0]).finish()
    started(tmp_path).finish()
    assert lines(tmp_path) == []


def test_a_resume_without_a_record(tmp_path):
    started(tmp_path, attempt=2, resumed_at=3).finish()
    assert lines(tmp_path) == []
