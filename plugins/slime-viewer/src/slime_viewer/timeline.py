"""Timeline: what trainer and engines did when, how old their data was, and the memory in use meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from slime_core.algorithm.metrics import ROLLOUT_AXIS
from slime_viewer.lanes import DEVICES, ENGINES, TRAINER
from slime_viewer.metric_log import MetricLog
from slime_viewer.open_run import OpenRun, seconds_of
from slime_viewer.run_events import event_text
from slime_viewer.spans import STARTING, Span, all_spans

WORKING: Final = frozenset({"rollout", "score", "train", "weights", "eval", "save", "sleep", "wake"}) | STARTING
"""Kinds of spans in which a lane is not idle."""
STEPS_SHOWN: Final = 20
MOST_SPANS: Final = 5000
MOST_MEASURED: Final = 2000


def timeline(run: OpenRun, start: float | None, end: float | None, most: int = MOST_SPANS) -> dict[str, Any]:
    """The reply to `/api/runs/{id}/timeline`. Without times: the last steps."""
    with run.lock:
        shared = bool(run.config.get("launcher", {}).get("colocate"))
        spans, source = all_spans(run.times, run.events, run.metrics, attempt_starts(run.events), shared=shared)
        marks: list[dict[str, Any]] = [
            {"time": time, "text": event_text(event)}
            for event in run.events
            if event.get("event") in MARKED and (time := seconds_of(event.get("time"))) is not None
        ]
        steps = step_columns(run.metrics)
        memory = measured_memory(run.times)
    first = min((span.start for span in spans), default=0.0)
    last = max((span.end for span in spans), default=0.0)
    if start is None or end is None:
        shown = sorted({span.step for span in spans if not math.isnan(span.step)})[-STEPS_SHOWN:]
        own = [span.start for span in spans if span.step in shown]
        start, end = (min(own) if own else first), last
    seen = [span for span in spans if span.end >= start and span.start <= end]
    seen = sorted(sorted(seen, key=lambda span: span.start - span.end)[:most], key=lambda span: span.start)
    lanes = sorted({span.lane for span in seen})
    in_view = {int(span.step) for span in seen if not math.isnan(span.step)}
    chosen = [row for row, step in enumerate(steps["step"]) if int(step) in in_view]
    return {
        "source": source,
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
        "memory": memory_columns(memory, start, end),
    }


MARKED: Final = frozenset(
    {"run_start", "run_end", "engine_lost", "engine_restarted", "engine_recovered", "checkpoint_saved"}
)


def attempt_starts(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """When each attempt began."""
    return {
        int(event["attempt"]): time
        for event in events
        if event.get("event") == "run_start" and (time := seconds_of(event.get("time"))) is not None
    }


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
    if lane not in (TRAINER, DEVICES):
        return None
    nodes, gpus = launcher.get("actor_num_nodes", 1), launcher.get("actor_num_gpus_per_node")
    return None if not gpus else f"{nodes} x {gpus} GPU"


Measured = Sequence[tuple[float, Mapping[str, tuple[int, int]]]]
"""Times, with bytes in use and bytes that there are, of the host and of each GPU."""


def measured_memory(times: Iterable[Mapping[str, Any]]) -> Measured:
    return [(float(line["time"]), line["memory"]) for line in times if {"time", "memory"} <= line.keys()]


def memory_columns(measured: Measured, start: float, end: float, most: int = MOST_MEASURED) -> dict[str, Any]:
    """Of the times in [start, end], at most so many, evenly chosen."""
    seen = [(time, memory) for time, memory in measured if start <= time <= end]
    seen = seen[:: max(1, math.ceil(len(seen) / most))]
    names = sorted({name for _, memory in seen for name in memory}, key=device_order)
    return {
        "time": [time for time, _ in seen],
        "what": names,
        "used": [[memory.get(name, (None,))[0] for _, memory in seen] for name in names],
        "limit": [max(memory[name][1] for _, memory in seen if name in memory) for name in names],
    }


def device_order(name: str) -> tuple[bool, int, str]:
    """GPUs by their number, the host last."""
    number = name.removeprefix("GPU ")
    return (not number.isdigit(), int(number) if number.isdigit() else 0, name)


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
