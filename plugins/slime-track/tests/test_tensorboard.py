from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError, StorageError
from slime_track.plugin import TensorBoard


def run_info(run_dir: Path, attempt: int = 1, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="tiny", run_dir=run_dir, config={}, attempt=attempt, resumed_at=resumed_at)


def tracker(run: RunInfo, **options: str) -> Tracker:
    started = TensorBoard.build(TensorBoard.Config(**options))
    started.start(run)
    return started


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag the points (step, value), as TensorBoard's own reader gives them."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(point.step, point.value) for point in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def log_rollout(to: Tracker, rollout_id: int, offset: float = 0.0) -> None:
    """A rollout of two optimizer steps, and an evaluation after every second one."""
    to.log("rollout/step", rollout_id, {"rollout/raw_reward": rollout_id + offset}, rollout_id=rollout_id)
    for step in (2 * rollout_id, 2 * rollout_id + 1):
        to.log("train/step", step, {"train/loss": step + offset, "train/grad_norm": 1.0}, rollout_id=rollout_id)
    if rollout_id % 2:
        to.log("eval/step", rollout_id, {"eval/held_out": rollout_id + offset}, rollout_id=rollout_id)


def test_each_metric_is_at_the_step_of_its_axis(tmp_path: Path) -> None:
    to = tracker(run_info(tmp_path))
    log_rollout(to, 0)
    log_rollout(to, 1)
    # Before finish: a killed run must have it too.
    assert scalars(tmp_path / "tensorboard") == {
        "rollout/raw_reward": [(0, 0.0), (1, 1.0)],
        "train/loss": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)],
        "train/grad_norm": [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)],
        "eval/held_out": [(1, 1.0)],
    }
    to.finish()
    to.finish()


def test_values_that_are_not_finite_or_not_float(tmp_path: Path) -> None:
    to = tracker(run_info(tmp_path))
    to.log("train/step", 5, {"a": math.nan, "b": math.inf, "c": 3, "d": 0.1}, rollout_id=5)
    to.log("train/step", 6, {}, rollout_id=5)
    to.finish()
    read = scalars(tmp_path / "tensorboard")
    assert math.isnan(read["a"][0][1])
    assert read["b"] == [(5, math.inf)]
    assert read["c"] == [(5, 3.0)]
    assert read["d"] == [(5, pytest.approx(0.1, rel=1e-7))]


def test_a_resumed_run_takes_back_what_it_runs_again(tmp_path: Path) -> None:
    first = tracker(run_info(tmp_path))
    for rollout_id in range(6):
        log_rollout(first, rollout_id)
    first.finish()

    second = tracker(run_info(tmp_path, attempt=2, resumed_at=3))
    # Rollouts 0, 1, 2: optimizer steps 0 to 5, though rollouts 3 to 5 have steps of the other axes in that range.
    assert scalars(tmp_path / "tensorboard") == {
        "rollout/raw_reward": [(0, 0.0), (1, 1.0), (2, 2.0)],
        "train/loss": [(step, float(step)) for step in range(6)],
        "train/grad_norm": [(step, 1.0) for step in range(6)],
        "eval/held_out": [(1, 1.0)],
    }
    log_rollout(second, 3, offset=0.5)
    second.finish()

    third = tracker(run_info(tmp_path, attempt=3, resumed_at=4))
    log_rollout(third, 4, offset=0.25)
    third.finish()
    assert scalars(tmp_path / "tensorboard") == {
        "rollout/raw_reward": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.5), (4, 4.25)],
        "train/loss": [(step, float(step)) for step in range(6)] + [(6, 6.5), (7, 7.5), (8, 8.25), (9, 9.25)],
        "train/grad_norm": [(step, 1.0) for step in range(10)],
        "eval/held_out": [(1, 1.0), (3, 3.5)],
    }
    assert all("tfevents" in path.name for path in (tmp_path / "tensorboard").iterdir())


def test_resuming_from_the_start_and_resuming_twice_without_a_step(tmp_path: Path) -> None:
    first = tracker(run_info(tmp_path))
    log_rollout(first, 0)
    first.finish()
    for attempt in (2, 3):
        tracker(run_info(tmp_path, attempt=attempt, resumed_at=0)).finish()
        assert scalars(tmp_path / "tensorboard") == {}


def test_a_killed_run_leaves_a_record_cut_off(tmp_path: Path) -> None:
    first = tracker(run_info(tmp_path))
    for rollout_id in range(3):
        log_rollout(first, rollout_id)
    first.finish()
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    second = tracker(run_info(tmp_path, attempt=2, resumed_at=2))
    log_rollout(second, 2)
    second.finish()
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(step, float(step)) for step in range(6)]


def test_a_damaged_record_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    first = tracker(run_info(tmp_path))
    for rollout_id in range(3):
        log_rollout(first, rollout_id)
    first.finish()
    (file,) = (tmp_path / "tensorboard").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"tfevents.* is damaged"):
        tracker(run_info(tmp_path, attempt=2, resumed_at=2))
    assert file.read_bytes() == content


def test_events_of_another_run_are_refused(tmp_path: Path) -> None:
    tracker(run_info(tmp_path)).finish()
    with pytest.raises(ConfigError, match="another run"):
        tracker(run_info(tmp_path))
    tracker(run_info(tmp_path), tb_experiment_name="again").finish()


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({}, "run/tensorboard"),
        ({"tb_project_name": "p"}, "run/tensorboard/p"),
        ({"tb_experiment_name": "e"}, "run/tensorboard/e"),
        ({"tb_project_name": "p", "tb_experiment_name": "e"}, "run/tensorboard/p/e"),
        ({"log_dir": "shared"}, "shared/tiny"),
        ({"log_dir": "shared", "tb_project_name": "p"}, "shared/p/tiny"),
        ({"log_dir": "shared", "tb_project_name": "p", "tb_experiment_name": "e"}, "shared/p/e"),
    ],
)
def test_where_the_events_lie(tmp_path: Path, options: dict[str, str], folder: str) -> None:
    config = TensorBoard.Config.model_validate(options, context={"base": tmp_path})
    to = TensorBoard.build(config)
    to.start(run_info(tmp_path / "run"))
    to.finish()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in files] == [tmp_path / folder]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(StorageError, match="cannot write events"):
        tracker(run_info(tmp_path))


def test_a_full_disk_stops_the_run(tmp_path: Path) -> None:
    # A limit on the size of files simulates a full disk.
    code = f"""
import resource, signal
from pathlib import Path
from slime_core.contracts.tracker import RunInfo
from slime_core.errors import StorageError
from slime_track.plugin import TensorBoard
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
to = TensorBoard.build(TensorBoard.Config())
to.start(RunInfo(name="tiny", run_dir=Path({str(tmp_path)!r}), config={{}}, attempt=1, resumed_at=None))
try:
    for step in range(1000):
        to.log("train/step", step, {{"train/loss": 1.0}}, rollout_id=step)
except StorageError as error:
    print(step, error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    step, _, message = run.stdout.partition(" ")
    # A step takes some 90 bytes.
    assert 20 < int(step) < 100
    assert "cannot write events" in message


def test_neither_torch_nor_tensorflow_is_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from slime_track.plugin import TensorBoard
print([m for m in ("torch", "numpy", "tensorboard") if m in sys.modules])
from slime_core.contracts.tracker import RunInfo
to = TensorBoard.build(TensorBoard.Config())
to.start(RunInfo(name="tiny", run_dir=Path({str(tmp_path)!r}), config={{}}, attempt=1, resumed_at=None))
to.log("train/step", 0, {{"train/loss": 1.0}}, rollout_id=0)
to.finish()
print([m for m in ("torch", "tensorflow") if m in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n[]\n"
