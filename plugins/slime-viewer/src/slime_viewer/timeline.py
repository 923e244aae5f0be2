"""Timeline: what trainer and engines did when, as recorded by slime-viewer, or laid out from the seconds in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from slime_core.algorithm.metrics import ROLLOUT_AXIS
from slime_viewer.metric_log import MetricLog
from slime_viewer.open_run import OpenRun, seconds_of
from slime_viewer.run_events import event_text

ENGINES: Final = "engines"
TRAINER: Final = "trainer"
WORKING: Final = frozenset({"rollout", "score", "train", "weights", "eval", "save", "sleep", "wake"})
"""Kinds of spans in which a lane is not idle."""
STEPS_SHOWN: Final = 20
MOST_SPANS: Final = 5000

BETWEEN_STEPS: Final = (
    ("perf/save_time", TRAINER, "save"),
    ("perf/sync_time", TRAINER, "weights"),
    ("perf/eval_time", ENGINES, "eval"),
    ("perf/rollout_time", ENGINES, "rollout"),
)
"""Parts of a step before its training, in their order."""


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    kind: str
    start: float
    """Seconds since the epoch."""
    end: float
    step: float
    """NaN: of no step."""


def timeline(run: OpenRun, start: float | None, end: float | None, most: int = MOST_SPANS) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/timeline`. Without times: the last steps."""
    with run.lock:
        recorded = recorded_spans(run.times)
        spans = recorded or estimated_spans(run.metrics, attempt_starts(run.events))
        marks: list[dict[str, Any]] = [
            {"time": time, "text": event_text(event)}
            for event in run.events
            if event.get("event") in MARKED and (time := seconds_of(event.get("time"))) is not None
        ]
        steps = step_columns(run.metrics)
    first = min((span.start for span in spans), default=0.0)
    last = max((span.end for span in spans), default=0.0)
    if start is None or end is None:
        shown = sorted({span.step for span in spans if not math.isnan(span.step)})[-STEPS_SHOWN:]
        own = [span.start for span in spans if span.step in shown]
        start, end = (min(own) if own else first), last
    seen = [span for span in spans if span.end >= start and span.start <= end]
    seen = sorted(sorted(seen, key=lambda span: span.start - span.end)[:most], key=lambda span: span.start)
    lanes = list(dict.fromkeys(sorted({span.lane for span in seen})))
    in_view = {int(span.step) for span in seen if not math.isnan(span.step)}
    chosen = [row for row, step in enumerate(steps["step"]) if int(step) in in_view]
    return {
        "source": "recorded" if recorded else "estimated",
        "first": first,
        "last": last,
        "start": start,
        "end": end,
        "lanes": [
            {"name": lane, "devices": devices_of(run.config, lane), "idle": idle_share(seen, lane, start, end)}
            for lane in lanes
        ],
        "lane": [lanes.index(span.lane) for span in seen],
        "kind": [span.kind for span in seen],
        "from": [span.start for span in seen],
        "to": [span.end for span in seen],
        "step": [span.step for span in seen],
        "marks": [mark for mark in marks if start <= mark["time"] <= end],
        "steps": {name: [values[row] for row in chosen] for name, values in steps.items()},
    }


MARKED: Final = frozenset(
    {"run_start", "run_end", "engine_lost", "engine_restarted", "engine_recovered", "checkpoint_saved"}
)


def recorded_spans(times: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Lines that are no spans are left out: others have measured memory."""
    found = []
    for line in times:
        if {"lane", "kind", "from", "to"} <= line.keys():
            step = line.get("step")
            found.append(
                Span(
                    str(line["lane"]),
                    str(line["kind"]),
                    float(line["from"]),
                    float(line["to"]),
                    math.nan if step is None else step,
                )
            )
    return found  # fmt: skip


def attempt_starts(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """When each attempt began."""
    return {
        int(event["attempt"]): time
        for event in events
        if event.get("event") == "run_start" and (time := seconds_of(event.get("time"))) is not None
    }


def estimated_spans(log: MetricLog, starts: Mapping[int, float]) -> list[Span]:
    """The parts of each step end to end, from the start of each attempt."""
    table = log.axes.get(ROLLOUT_AXIS)
    if table is None:
        return []
    rows = len(table.step)
    none = np.zeros(rows)
    column = {
        name: np.nan_to_num(found) if (found := log.column(ROLLOUT_AXIS, name)) is not None else none
        for name in ("perf/step_time", "perf/train_time", "perf/score_time", *(name for name, _, _ in BETWEEN_STEPS))
    }
    spans: list[Span] = []
    attempt, at = -1, 0.0
    for row in range(rows):
        if int(table.attempt[row]) != attempt:
            attempt = int(table.attempt[row])
            at = max(starts.get(attempt, at), at)
        step, end = table.rollout[row], at + column["perf/step_time"][row]
        for name, lane, kind in BETWEEN_STEPS:
            seconds = column[name][row]
            if seconds > 0:
                spans.append(Span(lane, kind, at, at + seconds, step))
                if lane == ENGINES:
                    spans.append(Span(TRAINER, "wait", at, at + seconds, step))
                elif kind == "weights":
                    spans.append(Span(ENGINES, kind, at, at + seconds, step))
                at += seconds
        begin = max(at, end - column["perf/train_time"][row])
        scored = min(end, begin + column["perf/score_time"][row])
        if scored > begin:
            spans.append(Span(TRAINER, "score", begin, scored, step))
        if end > scored:
            spans.append(Span(TRAINER, "train", scored, end, step))
        at = max(at, end)
    return spans


def idle_share(spans: Sequence[Span], lane: str, start: float, end: float) -> float | None:
    """The share of [start, end] in which the lane did nothing."""
    busy, until = 0.0, start
    for span in spans:
        if span.lane == lane and span.kind in WORKING:
            begin, stop = max(span.start, until), min(span.end, end)
            if stop > begin:
                busy, until = busy + stop - begin, stop
    return None if end <= start else 1 - busy / (end - start)


def devices_of(config: Mapping[str, Any], lane: str) -> str | None:
    """In words; None if the config does not have them."""
    launcher = config.get("launcher", {})
    if launcher.get("device", "cuda") == "cpu":
        return "CPU"
    if lane == ENGINES:
        each, number = launcher.get("rollout_num_gpus_per_engine"), launcher.get("num_engines")
        return None if not each or not number else f"{number} x {each} GPU"
    nodes, gpus = launcher.get("actor_num_nodes", 1), launcher.get("actor_num_gpus_per_node")
    return None if not gpus else f"{nodes} x {gpus} GPU"


def step_columns(log: MetricLog) -> dict[str, list[float]]:
    table = log.axes.get(ROLLOUT_AXIS)
    if table is None:
        return {name: [] for name in ("step", "staleness_mean", "staleness_max", "wait_ratio")}
    names = {
        "staleness_mean": "rollout/staleness/mean",
        "staleness_max": "rollout/staleness/max",
        "wait_ratio": "perf/wait_time_ratio",
    }
    none = [math.nan] * len(table.step)
    columns = {
        key: none if (found := log.column(ROLLOUT_AXIS, name)) is None else found.tolist()
        for key, name in names.items()
    }
    return {"step": list(table.rollout), **columns}
