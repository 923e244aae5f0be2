"""Against the real package, into a database file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError, StorageError
from slime_track.mlflow import AT_ONCE, allowed
from slime_track.plugin import Mlflow


def tracker(run_dir: Path, *, attempt: int = 1, resumed_at: int | None = None, **options: Any) -> Tracker:
    started = Mlflow.build(Mlflow.Config(**options))
    config = {"name": "tiny", "train": {"lr": 0.5, "notes": "x" * 1000}, "trackers": []}
    started.start(RunInfo(name="tiny", run_dir=run_dir, config=config, attempt=attempt, resumed_at=resumed_at))
    return started


def test_metrics_parameters_and_a_resume(tmp_path: Path) -> None:
    first = tracker(tmp_path, experiment="sums")
    first.log("train/step", 6, {"train/loss": 0.5, "train/grad_norm": math.inf}, rollout_id=3)
    first.log("eval/step", 4, {"eval/held_out-pass@4": 0.75, "odd": math.nan}, rollout_id=3)
    first.log("rollout/step", 3, {f"m{n}": float(n) for n in range(AT_ONCE + 5)}, rollout_id=3)
    first.finish()
    second = tracker(tmp_path, attempt=2, resumed_at=3, experiment="sums")
    second.log("train/step", 7, {"train/loss": 0.25}, rollout_id=3)
    second.finish()
    second.finish()

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "tiny"
    assert run.info.status == "FINISHED"
    assert run.info.run_id == (tmp_path / "mlflow_run_id").read_text()
    assert run.data.params["train.lr"] == "0.5"
    assert run.data.params["trackers"] == "[]"
    assert len(run.data.params["train.notes"]) == 500

    def points(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]

    assert points("train/loss") == [(6, 0.5), (7, 0.25)]
    assert points("eval/held_out-pass_at_4") == [(4, 0.75)]
    assert points(f"m{AT_ONCE + 4}") == [(3, AT_ONCE + 4.0)]
    assert math.isnan(points("odd")[0][1])


def test_a_server_that_is_gone_at_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(client: MlflowClient, run_id: str) -> None:
        raise MlflowException("connection refused")

    there = tracker(tmp_path)
    monkeypatch.setattr(MlflowClient, "set_terminated", gone)
    with pytest.raises(StorageError, match=r"tracker 'mlflow': cannot end run .*connection refused"):
        there.finish()
    there.finish()


def test_names_that_mlflow_does_not_know() -> None:
    assert allowed("eval/a set-pass@4") == "eval/a set-pass_at_4"
    assert allowed("error_cat/<x>") == "error_cat/_x_"


def test_a_missing_server_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracker 'mlflow': nowhere://"):
        tracker(tmp_path, tracking_uri="nowhere://x")
