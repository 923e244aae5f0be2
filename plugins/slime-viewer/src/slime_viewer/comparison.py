"""Comparison: a table of runs, a row for each number that one looks at first. `slime compare` prints it, the page draws it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slime_viewer.config_keys import config_difference
from slime_viewer.metric_log import Curve, eval_sets
from slime_viewer.open_run import OpenRun

RECENT: Final = 10
"""Values of a curve that "last" is the mean of."""


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    name: str
    kind: str
    """number, share, seconds, count, text or time."""
    better: str | None
    """high, low, or None: none is marked."""
    values: Sequence[float | str | None]

    def best(self) -> set[int]:
        """Places of the best values; empty if all are equal or none is better."""
        numbers = {
            place: value
            for place, value in enumerate(self.values)
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self.better is None or len(set(numbers.values())) < 2:
            return set()
        top = (max if self.better == "high" else min)(numbers.values())
        return {place for place, value in numbers.items() if value == top}


def last(curve: Curve) -> float:
    return float(curve.value[-RECENT:].mean())


def final(curve: Curve) -> float:
    return float(curve.value[-1])


def most(curve: Curve) -> float:
    return float(curve.value.max())


def total(curve: Curve) -> float:
    return float(curve.value.sum())


METRICS: Final[Sequence[tuple[str, str, str, str, str | None, Callable[[Curve], float]]]] = (
    ("rollout", "reward (last 10)", "rollout/raw_reward", "number", "high", last),
    ("rollout", "response tokens (last 10)", "rollout/response_len/mean", "number", None, last),
    ("rollout", "truncated (last 10)", "rollout/truncated_ratio", "share", "low", last),
    ("rollout", "groups without signal (last 10)", "rollout/zero_std/frac", "share", "low", last),
    ("rollout", "staleness (last 10)", "rollout/staleness/mean", "number", None, last),
    ("training", "entropy (last 10)", "train/entropy_loss", "number", None, last),
    ("training", "clip fraction (last 10)", "train/pg_clipfrac", "share", None, last),
    ("training", "gradient norm (last 10)", "train/grad_norm", "number", None, last),
    ("training", "trainer minus engine (last 10)", "train/train_rollout_logprob_abs_diff", "number", "low", last),
    ("training", "skipped steps", "train/skipped_steps", "count", "low", total),
    ("time", "step (last 10)", "perf/step_time", "seconds", "low", last),
    ("time", "waiting for rollouts (last 10)", "perf/rollout_time", "seconds", "low", last),
    ("time", "training (last 10)", "perf/train_time", "seconds", "low", last),
    ("time", "weight update (last 10)", "perf/update_weights_time", "seconds", "low", last),
    ("time", "tokens trained per second (last 10)", "perf/train_tok_per_s", "number", "high", last),
    ("time", "trained tokens", "perf/train_tokens", "count", None, total),
    ("time", "all steps", "perf/step_time", "seconds", None, total),
)
"""Section, name, metric, kind, what is better, and the number of its curve."""


def compare(runs: Sequence[OpenRun]) -> list[Row]:
    """Rows that at least one run has a value for."""
    for run in runs:
        run.refresh()
    summaries = [run.summary() for run in runs]
    rows = [
        Row("run", "state", "text", None, [str(summary["state"]) for summary in summaries]),
        Row("run", "steps", "count", None, [summary["steps"] for summary in summaries]),
    ]
    names = list(dict.fromkeys(name for run in runs for name in eval_sets(run.metrics)))
    for name in names:
        rows += [
            Row("evaluation", f"{name}, last", "number", "high", numbers(runs, f"eval/{name}", final)),
            Row(
                "evaluation",
                f"{name}, best",
                "number",
                "high",
                numbers(runs, f"eval/{name}", most),
            ),
        ]
    for section, name, metric, kind, better, number in METRICS:
        rows.append(Row(section, name, kind, better, numbers(runs, metric, number)))
    difference = config_difference(runs)
    for key, values, there in zip(difference["keys"], difference["values"], difference["there"], strict=True):
        texts = [written(value) if has else None for value, has in zip(values, there, strict=True)]
        rows.append(Row("config", key, "text", None, texts))
    return [row for row in rows if any(value is not None for value in row.values)]


def numbers(runs: Sequence[OpenRun], metric: str, number: Callable[[Curve], float]) -> list[float | None]:
    """A number of each run's curve; None without one."""
    curves = [run.metrics.curve(metric) for run in runs]
    return [number(curve) if curve is not None and len(curve.value) else None for curve in curves]


def written(value: Any) -> str:
    """A value of a config as it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


def compare_page(runs: Sequence[OpenRun]) -> dict[str, Any]:
    """The reply to `/api/compare`."""
    rows = [
        {"section": row.section, "name": row.name, "kind": row.kind, "better": row.better, "values": list(row.values)}
        for row in compare(runs)
    ]
    return {"runs": [run.id for run in runs], "rows": rows}
