"""Trackers, in a run folder of their own."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.jsonl import JsonlTracker
from slime_plugin_kit.case import Case

AXES = ("train/step", ROLLOUT_AXIS, EVAL_AXIS)


def run_of(folder: Path, *, attempt: int = 1, resumed_at: int | None = None) -> RunInfo:
    config = {"name": "tiny", "train": {"lr": 1e-3}, "trackers": ["jsonl"]}
    return RunInfo(name="tiny", run_dir=folder, config=config, attempt=attempt, resumed_at=resumed_at)


def metrics_of(axis: str, step: int) -> dict[str, float]:
    kind = axis.partition("/")[0]
    return {
        f"{kind}/reward": 0.5 + step,
        "rollout/raw_reward": 0.25 * step,
        "eval/held_out": 0.1 * step,
        "eval/held_out-truncated_ratio": 0.0,
        "eval/a set-pass@4": float(step),
    }


def log_steps(tracker: Tracker, steps: Sequence[int]) -> None:
    for step in steps:
        for axis in AXES:
            tracker.log(axis, step, metrics_of(axis, step), rollout_id=step)


def attempt(case: Case, folder: Path, steps: Sequence[int], **run: int) -> None:
    """Runs the tracker beside the kernel's own, as a run does."""
    trackers: list[Tracker] = [JsonlTracker(), case.build()]
    for tracker in trackers:
        tracker.start(run_of(folder, **run))
    for tracker in trackers:
        log_steps(tracker, steps)
    for tracker in trackers:
        tracker.finish()


def open_files(folder: Path) -> set[str]:
    """Open files of this process under `folder`; empty where the system has no /proc."""
    listing = Path("/proc/self/fd")
    found = set()
    for link in listing.iterdir() if listing.is_dir() else ():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.add(target)
    return found


def test_it_logs_and_closes(case: Case, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    attempt(case, tmp_path, range(3))
    left = open_files(tmp_path)
    assert not left, f"after finish it still has open: {', '.join(sorted(left))}"
    running = [thread.name for thread in set(threading.enumerate()) - threads if not thread.daemon]
    assert not running, f"after finish its threads still run: {', '.join(running)}"


def test_a_run_without_steps_is_closed_too(case: Case, tmp_path: Path) -> None:
    attempt(case, tmp_path, ())
    assert not open_files(tmp_path)


def test_metrics_are_left_alone(case: Case, tmp_path: Path) -> None:
    tracker = case.build()
    tracker.start(run_of(tmp_path))
    for axis in AXES:
        metrics: Mapping[str, float] = metrics_of(axis, 1)
        tracker.log(axis, 1, metrics, rollout_id=1)
        assert metrics == metrics_of(axis, 1), f"the metrics are others afterwards: {metrics}"
    tracker.finish()


def test_numbers_that_are_not_finite_are_accepted(case: Case, tmp_path: Path) -> None:
    tracker = case.build()
    tracker.start(run_of(tmp_path))
    odd = {"train/loss": float("nan"), "train/grad_norm": float("inf"), "rollout/raw_reward": float("nan")}
    for axis in AXES:
        tracker.log(axis, 0, odd, rollout_id=0)
    tracker.log(ROLLOUT_AXIS, 1, {}, rollout_id=1)
    tracker.finish()


def test_a_resumed_run_continues(case: Case, tmp_path: Path) -> None:
    attempt(case, tmp_path, range(4))
    attempt(case, tmp_path, range(2, 5), attempt=2, resumed_at=2)
    attempt(case, tmp_path, range(5, 6), attempt=3, resumed_at=5)


def test_other_files_are_left_alone(case: Case, tmp_path: Path) -> None:
    others = {"config.toml": "name = 'tiny'\n", "checkpoints/step_1/COMPLETE": "", "rollouts/step_000000.parquet": "x"}
    for name, text in others.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    attempt(case, tmp_path, range(3))
    attempt(case, tmp_path, range(2, 4), attempt=2, resumed_at=2)
    changed = [name for name, text in others.items() if not same(tmp_path / name, text)]
    assert not changed, f"it changes what is not its own: {', '.join(changed)}"


def same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text
