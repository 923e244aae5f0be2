"""Against the real package, offline: what is read back is what `wandb sync` would send."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError
from slime_track.plugin import Wandb

CONFIG = {
    "name": "tiny",
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 8},
    "train": {"global_batch_size": 16},
}
BLOCK = 32768


def tracker(run_dir: Path, *, attempt: int = 1, resumed_at: int | None = None, **options: Any) -> Tracker:
    started = Wandb.build(Wandb.Config(wandb_mode="offline", **options))
    started.start(RunInfo(name="tiny", run_dir=run_dir, config=CONFIG, attempt=attempt, resumed_at=resumed_at))
    return started


def records(path: Path) -> list[Record]:
    """The format is LevelDB's log behind a header of 7 bytes: blocks of records, each with checksum, length and kind."""
    data, at, found, part = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):
            # It is being written.
            break
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b""
    return found


def logged(folder: Path) -> tuple[list[dict[str, Any]], list[Record]]:
    """The rows in order, without W&B's own columns; and all records."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    # W&B's own process writes the file, a little after `finish`; when this process ends it waits for that.
    deadline = time.monotonic() + 60
    everything = records(path)
    while not any(record.WhichOneof("record_type") == "exit" for record in everything):
        assert time.monotonic() < deadline, "the file never ended"
        time.sleep(0.05)
        everything = records(path)
    rows = []
    for record in everything:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows, everything


def log_some(to: Tracker) -> None:
    to.log("train/step", 6, {"train/loss": 0.5}, rollout_id=3)
    to.log("rollout/step", 3, {"rollout/raw_reward": 0.25, "perf/step_time": 2.0}, rollout_id=3)
    to.log("eval/step", 4, {"eval/held_out": 0.75, "eval/held_out-pass@4": math.nan}, rollout_id=3)
    to.finish()


def test_each_metric_is_over_its_axis(tmp_path: Path) -> None:
    log_some(tracker(tmp_path, wandb_project="p", wandb_group="g", wandb_team="t"))
    rows, everything = logged(tmp_path)
    assert rows[0] == {"train/loss": 0.5, "train/step": 6}
    assert rows[1] == {"rollout/raw_reward": 0.25, "perf/step_time": 2.0, "rollout/step": 3}
    assert rows[2]["eval/step"] == 4
    assert rows[2]["eval/held_out"] == 0.75
    (run,) = [record.run for record in everything if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.entity) == ("p", "g", "t")
    assert run.run_id == (tmp_path / "wandb_run_id").read_text()
    assert run.display_name == f"tiny-{run.run_id}"
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["rollout"]["rollout_batch_size"] == 4
    axes = {m.metric.glob_name: m.metric.step_metric for m in everything if m.WhichOneof("record_type") == "metric"}
    assert axes["perf/*"] == axes["rollout/*"] == "rollout/step"
    assert (axes["train/*"], axes["eval/*"]) == ("train/step", "eval/step")


def test_a_resumed_run_keeps_its_id_and_the_train_step_may_be_the_axis_of_all(tmp_path: Path) -> None:
    options = {"wandb_always_use_train_step": True, "disable_wandb_random_suffix": True, "wandb_run_id": "mine"}
    (tmp_path / "first").mkdir()
    tracker(tmp_path / "first").finish()
    assert (tmp_path / "first" / "wandb_run_id").read_text() not in ("", "mine")
    (tmp_path / "wandb_run_id").write_text("known")
    log_some(tracker(tmp_path, attempt=2, resumed_at=3, **(options | {"wandb_run_id": None})))
    rows, everything = logged(tmp_path)
    # 32 rollouts a step, 16 of them an optimizer step: two of those for each rollout step.
    assert [row["train/step"] for row in rows] == [6, 6, 8]
    (run,) = [record.run for record in everything if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name) == ("known", "tiny")


def test_a_refusal_of_wandb_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'tracker \'wandb\': .*wandb_mode = "offline"'):
        tracker(tmp_path, wandb_run_id="a/b:c")


@pytest.mark.parametrize(("driver", "package"), [("Wandb", "wandb"), ("Mlflow", "mlflow")])
def test_without_its_package_the_error_names_the_package_to_install(driver: str, package: str) -> None:
    code = f"""
import sys
from slime_track.plugin import {driver}
assert "{package}" not in sys.modules
sys.modules["{package}"] = None
from slime_core.errors import PluginError
try:
    {driver}.build({driver}.Config())
except PluginError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"pip install 'slime-track[{package}]'" in run.stdout
