"""MetricLog: metrics.jsonl as columns, and the curves of metrics over steps, tokens and hours."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS
from slime_viewer.line_file import LineFile

Float64 = npt.NDArray[np.float64]

FILE: Final = "metrics.jsonl"
SECONDS_PER_HOUR: Final = 3600


@dataclass(slots=True)
class AxisTable:
    """The lines of one axis: a row each."""

    step: array[float] = field(default_factory=lambda: array("d"))
    rollout: array[float] = field(default_factory=lambda: array("d"))
    attempt: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, array[float]] = field(default_factory=dict)
    """NaN where a line lacks the metric."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError if it is no line of metrics."""
        head = float(line["step"]), float(line["rollout_id"]), float(line["attempt"])
        metrics = {str(name): as_float(value) for name, value in line["metrics"].items()}
        rows = len(self.step)
        for name in metrics.keys() - self.columns.keys():
            self.columns[name] = array("d", [math.nan]) * rows
        for column, value in zip((self.step, self.rollout, self.attempt), head, strict=True):
            column.append(value)
        for name, column in self.columns.items():
            column.append(metrics.get(name, math.nan))

    def of(self, name: str) -> Float64:
        """(rows,) a copy: the array may grow meanwhile."""
        return np.array(self.columns[name], np.float64)


def as_float(value: Any) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric where it was logged, in the order of its lines; all arrays (points,)."""

    axis: str
    step: Float64
    rollout: Float64
    attempt: Float64
    value: Float64
    tokens: Float64 | None
    hours: Float64 | None


class MetricLog:
    """Reads on when it is asked to."""

    def __init__(self, folder: Path) -> None:
        self._file = LineFile(folder / FILE)
        self.axes: dict[str, AxisTable] = {}
        self.bad_line: str | None = None

    @property
    def problem(self) -> str | None:
        return self._file.problem or self.bad_line

    def refresh(self) -> bool:
        """True if there is anything new."""
        anew, lines = self._file.read_on()
        if anew:
            self.axes, self.bad_line = {}, None
        for line in lines:
            try:
                self.axes.setdefault(str(line["axis"]), AxisTable()).add(line)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.bad_line = f"{FILE}: a line lacks what metrics have ({type(error).__name__}: {error})"
        return anew or bool(lines)

    def names(self) -> Iterator[tuple[str, str]]:
        """Axis and name of each metric, by axis, then by name."""
        for axis in sorted(self.axes):
            for name in sorted(self.axes[axis].columns):
                yield axis, name

    def last(self, name: str) -> float | None:
        """The newest value, None without any."""
        curve = self.curve(name)
        return None if curve is None or not len(curve.value) else float(curve.value[-1])

    def column(self, axis: str, name: str) -> Float64 | None:
        """(rows,) with NaN where a line lacks it; None if there is no such metric."""
        table = self.axes.get(axis)
        return None if table is None or name not in table.columns else table.of(name)

    def curve(self, name: str) -> Curve | None:
        """None if no axis has the metric."""
        for axis, table in self.axes.items():
            if name in table.columns:
                value = table.of(name)
                there = ~np.isnan(value)
                rollout = np.array(table.rollout)[: len(value)]
                return Curve(
                    axis=axis,
                    step=np.array(table.step)[: len(value)][there],
                    rollout=rollout[there],
                    attempt=np.array(table.attempt)[: len(value)][there],
                    value=value[there],
                    tokens=self._until(axis, rollout[there], "perf/train_tokens"),
                    hours=self._until(axis, rollout[there], "perf/step_time", SECONDS_PER_HOUR),
                )
        return None

    def _until(self, axis: str, rollout: Float64, name: str, unit: float = 1.0) -> Float64 | None:
        """The sum of a metric of rollout steps, up to each row's step, that step included."""
        of_steps = self.column(ROLLOUT_AXIS, name)
        if of_steps is None:
            return None
        steps = np.array(self.axes[ROLLOUT_AXIS].rollout)[: len(of_steps)]
        order = np.argsort(steps, kind="stable")
        sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(of_steps[order]))]) / unit
        return sums[np.searchsorted(steps[order], rollout, side="right")]


def eval_sets(log: MetricLog) -> list[str]:
    """Names of the evaluation sets, from their metrics `eval/NAME` and `eval/NAME-truncated_ratio`."""
    table = log.axes.get(EVAL_AXIS)
    ending = "-truncated_ratio"
    names = () if table is None else table.columns
    return sorted(name.removeprefix("eval/").removesuffix(ending) for name in names if name.endswith(ending))


def in_buckets(curve: Curve, points: int) -> tuple[npt.NDArray[np.int64], Float64, Float64 | None, Float64 | None]:
    """At most `points` buckets of consecutive rows: the last row of each, its mean, its least and its most; without the last
    two if every row has a bucket of its own."""
    rows = len(curve.value)
    if rows <= points:
        return np.arange(rows), curve.value, None, None
    starts = np.linspace(0, rows, points, endpoint=False).astype(np.int64)
    ends = np.append(starts[1:], rows)
    mean = np.add.reduceat(curve.value, starts) / (ends - starts)
    return ends - 1, mean, np.minimum.reduceat(curve.value, starts), np.maximum.reduceat(curve.value, starts)
