"""Spans of the timeline: what a lane did when, from what slime-viewer recorded, from events.jsonl, or from metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from slime_core.algorithm.metrics import ROLLOUT_AXIS
from slime_viewer.lanes import DEVICES, ENGINES, TRAINER
from slime_viewer.metric_log import MetricLog

STEP_TIME: Final = "step_time"
"""The event that lists what the time of a step was spent on."""

IN_STEPS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "rollout": ((ENGINES, "rollout"), (TRAINER, "wait")),
    "drain": ((TRAINER, "wait"),),
    "train": ((TRAINER, "train"),),
    "update_weights": ((TRAINER, "weights"), (ENGINES, "weights")),
    "save": ((TRAINER, "save"),),
    "eval": ((ENGINES, "eval"), (TRAINER, "wait")),
    "sleep": ((TRAINER, "sleep"),),
    "wake_up": ((TRAINER, "wake"),),
    "engine_sleep": ((ENGINES, "sleep"),),
    "engine_wake_up": ((ENGINES, "wake"),),
}
"""Lanes and kinds of the parts of a step in the event."""
START_TIME: Final = "start_time"
"""The event that lists what the time before the first step of an attempt was spent on."""
IN_START: Final[Mapping[str, str]] = {"driver": "driver", "trainer": TRAINER, "engine": ENGINES}
"""Lanes of its parts, by the word before a slash: `engine/load`."""
STARTING: Final = frozenset({"driver", "imports", "load", "graphs", "other"})
"""Kinds of spans of a start."""
TIMES: Final = frozenset({STEP_TIME, START_TIME})
MOVES: Final = ("sleep", "wake")
"""Kinds of spans in which memory of devices is given to others, or taken back."""

BETWEEN_STEPS: Final = (
    (("perf/save_time",), TRAINER, "save"),
    (("perf/sync_time", "perf/update_weights_time"), TRAINER, "weights"),
    (("perf/eval_time",), ENGINES, "eval"),
    (("perf/rollout_time",), ENGINES, "rollout"),
)
"""Parts of a step before its training, in their order; of several names the first that is there."""


@dataclass(frozen=True, slots=True)
class Span:
    lane: str
    kind: str
    start: float
    """Seconds since the epoch."""
    end: float
    step: float
    """NaN: of no step."""


def recorded_spans(times: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Lines that are no spans are left out: others have measured memory."""
    found = []
    for line in times:
        if {"lane", "kind", "from", "to"} <= line.keys():
            step = line.get("step")
            place = math.nan if step is None else step
            found.append(Span(str(line["lane"]), str(line["kind"]), float(line["from"]), float(line["to"]), place))
    return found


def spans_of_steps(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """What the events of steps and of starts list, without parts that are not known here."""
    found = []
    for event in events:
        if event.get("event") in TIMES and {"began", "spans"} <= event.keys():
            began, step = float(event["began"]), float(event.get("rollout_id", math.nan))
            for part, start, end in event["spans"]:
                for lane, kind in lanes_of(part):
                    found.append(Span(lane, kind, began + start, began + end, step))
    return found


def lanes_of(part: str) -> Sequence[tuple[str, str]]:
    """Lanes, and the kind in each, of a part of a step or a start."""
    if part in IN_STEPS:
        return IN_STEPS[part]
    whose, _, what = part.partition("/")
    return ((IN_START[whose], what or whose),) if whose in IN_START else ()


def estimated_spans(log: MetricLog, starts: Mapping[int, float]) -> list[Span]:
    """The parts of each step end to end, from the start of each attempt."""
    table = log.axes.get(ROLLOUT_AXIS)
    if table is None:
        return []
    spans: list[Span] = []
    column = Columns(log, len(table.step))
    attempt, at = -1, 0.0
    for row in range(len(table.step)):
        if int(table.attempt[row]) != attempt:
            attempt = int(table.attempt[row])
            at = max(starts.get(attempt, at), at)
        step, end = table.rollout[row], at + column.of("perf/step_time")[row]
        for names, lane, kind in BETWEEN_STEPS:
            seconds = column.of(*names)[row]
            if seconds > 0:
                spans.append(Span(lane, kind, at, at + seconds, step))
                if lane == ENGINES:
                    spans.append(Span(TRAINER, "wait", at, at + seconds, step))
                elif kind == "weights":
                    spans.append(Span(ENGINES, kind, at, at + seconds, step))
                at += seconds
        begin = max(at, end - column.of("perf/train_time")[row])
        scored = min(end, begin + column.of("perf/score_time")[row])
        if scored > begin:
            spans.append(Span(TRAINER, "score", begin, scored, step))
        if end > scored:
            spans.append(Span(TRAINER, "train", scored, end, step))
        at = max(at, end)
    return spans


def estimated_moves(log: MetricLog, spans: Sequence[Span]) -> list[Span]:
    """Where trainer and engines went to sleep and woke up, by the seconds of each step and the order of phases: engines sleep
    before the trainer scores, then it wakes up; at the end of a weight update it sleeps, then the engines wake up."""
    table = log.axes.get(ROLLOUT_AXIS)
    if table is None:
        return []
    begins: dict[float, float] = {}
    updates = sorted({span.end for span in spans if span.kind == "weights"})
    for span in spans:
        if span.lane == TRAINER and span.kind in ("score", "train"):
            begins[span.step] = min(span.start, begins.get(span.step, math.inf))
    column = Columns(log, len(table.step))
    found = []
    for row in range(len(table.step)):
        step = table.rollout[row]
        if (began := begins.get(step)) is None:
            continue
        asleep, awake = column.of("perf/engine_sleep_time")[row], column.of("perf/wake_up_time")[row]
        found += [
            Span(ENGINES, "sleep", began - asleep, began, step),
            Span(TRAINER, "wake", began, began + awake, step),
        ]
        before = [end for end in updates if end <= began]
        if before:
            asleep, awake = column.of("perf/sleep_time")[row], column.of("perf/engine_wake_up_time")[row]
            handed = before[-1] - awake
            found += [
                Span(TRAINER, "sleep", handed - asleep, handed, step),
                Span(ENGINES, "wake", handed, before[-1], step),
            ]
    return [span for span in found if span.end > span.start]


class Columns:
    """Metrics of rollout steps, 0 where a step lacks one."""

    def __init__(self, log: MetricLog, rows: int) -> None:
        self._log = log
        self._none = np.zeros(rows)
        self._read: dict[tuple[str, ...], Any] = {}

    def of(self, *names: str) -> Any:
        """(rows,) the first of the names that there is."""
        if names not in self._read:
            found = (self._log.column(ROLLOUT_AXIS, name) for name in names)
            self._read[names] = next((np.nan_to_num(values) for values in found if values is not None), self._none)
        return self._read[names]


def all_spans(
    times: Iterable[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    log: MetricLog,
    starts: Mapping[int, float],
    *,
    shared: bool,
) -> tuple[list[Span], str]:
    """With `recorded` or `estimated`. `shared`: trainer and engines share devices, which then have a lane of their own."""
    recorded, of_steps = recorded_spans(times), spans_of_steps(events)
    spans = recorded or of_steps or estimated_spans(log, starts)
    if recorded:
        spans = spans + [span for span in of_steps if span.kind in STARTING.union(MOVES)]
    if not any(span.kind in MOVES for span in spans):
        spans = spans + estimated_moves(log, spans)
    if shared:
        busy = [
            replace(span, lane=DEVICES) for span in spans if span.kind != "wait" and span.lane in (ENGINES, TRAINER)
        ]
        # A weight update is both's.
        spans = spans + list(dict.fromkeys(busy))
    return spans, "recorded" if recorded or of_steps else "estimated"
