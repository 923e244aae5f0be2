from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.jsonl import JsonlTracker
from slime_core.errors import ConfigError, StorageError
from slime_track import curves
from slime_track.plugin import Curves

Points = dict[str, list[tuple[float, float]]]


def run_info(run_dir: Path, attempt: int = 1, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="tiny", run_dir=run_dir, config={}, attempt=attempt, resumed_at=resumed_at)


def started(tracker: Tracker, run: RunInfo) -> Tracker:
    tracker.start(run)
    return tracker


def log_rollout(trackers: list[Tracker], rollout_id: int, offset: float = 0.0) -> None:
    """A rollout of two optimizer steps, and an evaluation after every second one, as the kernel logs them."""
    for to in trackers:
        reward = {"rollout/raw_reward": rollout_id + offset, "rollout/response_len/mean": 9.0}
        to.log("rollout/step", rollout_id, reward, rollout_id=rollout_id)
        for step in (2 * rollout_id, 2 * rollout_id + 1):
            to.log("train/step", step, {"train/loss": 100.0}, rollout_id=rollout_id)
        if rollout_id % 2:
            log_eval(to, rollout_id, {"greedy": 10 * rollout_id + offset, "sampled": 5 * rollout_id + offset})


def log_eval(to: Tracker, rollout_id: int, accuracies: dict[str, float]) -> None:
    metrics = {}
    for name, accuracy in accuracies.items():
        metrics |= {
            f"eval/{name}": accuracy,
            f"eval/{name}-truncated_ratio": 77.0,
            f"eval/{name}/response_len/mean": 77.0,
        }
        metrics |= {f"eval/{name}-pass@1": 77.0}
    to.log("eval/step", rollout_id + 1, metrics, rollout_id=rollout_id)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What is drawn, as matplotlib holds it."""
    drawn: list[Figure] = []
    draw = curves.draw

    def keep(*arguments: object) -> Figure:
        drawn.append(draw(*arguments))  # type: ignore[arg-type]
        return drawn[-1]

    monkeypatch.setattr(curves, "draw", keep)
    return drawn


def points(axes: Axes) -> Points:
    """By label what is plotted; matplotlib calls a line without a label _child."""
    return {str(line.get_label()).strip(): [tuple(p) for p in line.get_xydata().tolist()] for line in axes.lines}  # type: ignore[misc,union-attr]


def test_both_panels_show_what_was_logged(tmp_path: Path, figures: list[Figure]) -> None:
    to = started(Curves.build(Curves.Config()), run_info(tmp_path))
    log_eval(to, -1, {"greedy": 0.25, "sampled": 0.125})
    for rollout_id in range(4):
        log_rollout([to], rollout_id)
    to.finish()

    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > picture.shape[0] > 300
    assert picture[..., :3].std() > 0.02
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    (figure,) = figures
    reward, accuracy = figure.axes
    assert points(reward) == {"_child0": [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]}
    assert points(accuracy) == {
        "greedy": [(0, 0.25), (2, 10.0), (4, 30.0)],
        "sampled": [(0, 0.125), (2, 5.0), (4, 15.0)],
    }
    assert figure.get_suptitle() == "tiny"
    assert [axes.get_xlabel() for axes in figure.axes] == ["rollout steps", "rollout steps"]
    assert reward.get_legend() is None
    assert [text.get_text().strip() for text in accuracy.get_legend().get_texts()] == ["greedy", "sampled"]


@pytest.mark.parametrize("order", ["jsonl first", "curves first"])
def test_a_resumed_run_draws_the_earlier_attempt_up_to_its_checkpoint(
    tmp_path: Path, figures: list[Figure], order: str
) -> None:
    first: list[Tracker] = [
        started(tracker, run_info(tmp_path)) for tracker in (JsonlTracker(), curves.CurvesTracker())
    ]
    for rollout_id in range(6):
        log_rollout(first, rollout_id)
    # Killed: finish is not called. The checkpoint was taken after rollouts 0 to 3, before the evaluation of the last.
    second: list[Tracker] = [JsonlTracker(), curves.CurvesTracker()]
    for tracker in second if order == "jsonl first" else reversed(second):
        tracker.start(run_info(tmp_path, attempt=2, resumed_at=4))
    for tracker in second:
        log_eval(tracker, 3, {"greedy": 30.5, "sampled": 15.5})
    log_rollout(second, 4, offset=0.5)
    for tracker in second:
        tracker.finish()
    reward, accuracy = figures[-1].axes
    assert points(reward)["_child0"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]
    assert points(accuracy) == {"greedy": [(2, 10.0), (4, 30.5)], "sampled": [(2, 5.0), (4, 15.5)]}


def test_a_run_that_continues_without_its_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing.*before step 3.*jsonl"):
        started(curves.CurvesTracker(), run_info(tmp_path, attempt=2, resumed_at=3))
    # Nothing had been measured: nothing is missing.
    started(curves.CurvesTracker(), run_info(tmp_path, attempt=2, resumed_at=0))


def test_without_evaluation_there_is_one_panel_and_without_anything_no_picture(
    tmp_path: Path, figures: list[Figure]
) -> None:
    to = started(curves.CurvesTracker(), run_info(tmp_path))
    to.finish()
    assert list(tmp_path.iterdir()) == []
    log_rollout([to], 0)
    to.finish()
    (axes,) = figures[0].axes
    assert points(axes) == {"_child0": [(0, 0.0)]}
    assert axes.lines[0].get_marker() == "o", "a single point has no line"


def test_names_that_mean_something_to_matplotlib(tmp_path: Path, figures: list[Figure]) -> None:
    to = started(curves.CurvesTracker(), run_info(tmp_path))
    log_eval(to, 0, {"_hidden": 0.5, r"$\frac$": 0.25})
    to.finish()
    assert len(figures[0].axes[0].get_legend().get_texts()) == 2


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    to = started(curves.CurvesTracker(), run_info(tmp_path / "gone"))
    log_rollout([to], 0)
    with pytest.raises(StorageError, match=r"cannot write .*curves\.png"):
        to.finish()


def test_without_matplotlib_the_error_names_the_package_to_install() -> None:
    code = """
import sys
from slime_track.plugin import Curves
assert "matplotlib" not in sys.modules
sys.modules["matplotlib"] = None
from slime_core.errors import PluginError
try:
    Curves.build(Curves.Config())
except PluginError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'slime-track[plot]'" in run.stdout
