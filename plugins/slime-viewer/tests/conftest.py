"""Run folders that are written here, and a client of the page's server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime_core.data.table import dump_file, write_groups
from slime_viewer.replies import Page
from slime_viewer.run_list import RunList

# The suite is collected with importlib, which does not put its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from written_runs import Asking, make_groups, write_metrics


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Two steps, the second with a group that has an episode of two samples with the same index."""
    folder = tmp_path / "a run"
    (folder / "rollouts").mkdir(parents=True)
    write_groups(dump_file(folder / "rollouts", 0), make_groups(0, [["the first", "second thing"], ["third", ""]]))
    one, two = make_groups(1, [["a THING", "nothing", "Straße"], ["last", "çedilla"]])
    two = replace(two, samples=(two.samples[0], replace(two.samples[1], index=two.samples[0].index)))
    write_groups(dump_file(folder / "rollouts", 1), [one, two])
    write_metrics(
        folder,
        [
            ("train/step", 0, 0, {"train/loss": 0.5, "train/skipped_steps": 0.0}),
            ("rollout/step", 0, 0, {"rollout/raw_reward": 0.25, "perf/step_time": 3600.0, "perf/train_tokens": 10.0}),
            ("train/step", 1, 1, {"train/loss": 0.25, "train/skipped_steps": 1.0}),
            ("rollout/step", 1, 1, {"rollout/raw_reward": 0.75, "perf/step_time": 1800.0, "perf/train_tokens": 30.0}),
            ("eval/step", 2, 1, {"eval/test": 0.5, "eval/test-truncated_ratio": 0.0}),
        ],
    )
    manifest = {"config": {"name": "written", "train": {"num_rollout": 2, "lr": 0.1}}, "trust_remote_code": False}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def ask() -> Callable[..., Asking]:
    return lambda *folders, panels=(): Asking(Page(RunList(folders), dict(panels)))
