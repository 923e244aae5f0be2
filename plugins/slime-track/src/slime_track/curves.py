"""Tracker curves: plots a run's reward and held-out accuracy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.jsonl import FILE, kept_lines
from slime_core.errors import ConfigError, StorageError
from slime_track.curve import Curve

PICTURE: Final = "curves.png"
REWARD: Final = "rollout/raw_reward"
EVAL: Final = "eval/"
DPI: Final = 150
FEW: Final = 30
"""Curves of at most this many points have a marker at each point."""


class CurvesTracker(Tracker):
    """Keeps the values of a few metrics, and plots them when the run ends, also if it fails.

    The values of earlier attempts are read from the metrics.jsonl of the kernel's tracker.
    """

    def __init__(self) -> None:
        self._run: RunInfo | None = None
        self._reward = Curve()
        self._evals: dict[str, Curve] = {}

    def start(self, run: RunInfo) -> None:
        """ConfigError if the run resumes, and metrics.jsonl with its earlier values is missing."""
        self._run = run
        if not run.resumed_at:
            return
        path = run.run_dir / FILE
        if not path.exists():
            raise ConfigError(
                f"tracker 'curves': {path} is missing, and with it the values before step {run.resumed_at}. Set the "
                "tracker jsonl with curves from the start of a run, or resume this one without curves."
            )
        for line in kept_lines(path, run.resumed_at):
            record = json.loads(line)
            self.log(record["axis"], record["step"], record["metrics"], rollout_id=record["rollout_id"])

    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        if axis == ROLLOUT_AXIS and REWARD in metrics:
            self._reward.add(step, metrics[REWARD])
        if axis == EVAL_AXIS:
            for name in eval_sets(metrics):
                self._evals.setdefault(name, Curve()).add(step, metrics[EVAL + name])

    def finish(self) -> None:
        """Writes curves.png atomically; writes nothing if there are no measurements."""
        if self._run is None or not (self._reward or self._evals):
            return
        path = self._run.run_dir / PICTURE
        aside = path.with_name(f".{PICTURE}.writing")
        try:
            draw(self._run.name, self._reward, self._evals).savefig(aside, format="png", dpi=DPI)
            os.replace(aside, path)
        except OSError as error:
            raise StorageError(f"tracker 'curves': cannot write {path}: {error}.") from error


def eval_sets(metrics: Mapping[str, float]) -> list[str]:
    """The evaluation sets in metric names: each `eval/NAME` has a metric `eval/NAME-truncated_ratio`."""
    return [
        name.removeprefix(EVAL) for name in metrics if name.startswith(EVAL) and f"{name}-truncated_ratio" in metrics
    ]


def draw(title: str, reward: Curve, evals: Mapping[str, Curve]) -> Figure:
    """Draws two panels: the mean reward of each step's samples, and the accuracy on each evaluation set. An empty panel is
    left out."""
    panels = [("reward, mean of the samples", {"": reward} if reward else {}), ("held-out accuracy", evals)]
    panels = [(label, curves) for label, curves in panels if curves]
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    figure.suptitle(title)
    for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, curve in sorted(curves.items()):
            _plot(axes, name, curve)
        if any(curves):
            axes.legend(frameon=False)
        axes.set_xlabel("rollout steps")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _plot(axes: Axes, name: str, curve: Curve) -> None:
    steps, values = curve.points
    marker = "o" if len(steps) <= FEW else ""
    # A dollar sign would begin a formula; a leading underscore would keep the name out of the legend.
    label = " " + name.replace("$", r"\$") if name else None
    axes.plot(steps, values, label=label, linewidth=1.6, marker=marker, markersize=3)
