"""EventLog: events.jsonl in the run folder, what happened to a run. {"time", "attempt", "event", …} a line.

Steps and their metrics are in metrics.jsonl. Unlike that file, this one is never truncated, so it also records attempts that
were lost.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from slime_core.atomic_io.storage import written
from slime_core.contracts.hookspecs import (
    Event,
    EventLoopBlocked,
    RunEnd,
    RunReady,
    StepTrained,
    UpdateWeightsEnd,
    hookimpl,
)
from slime_core.errors import StorageError
from slime_core.types.report import Lap


class EventLog:
    """An observer. A line is written before the run continues; StorageError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with contextlib.suppress(OSError), path.open("rb+") as file:
            # What an attempt that was killed, or a full disk, cut short is a line of its own.
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")

    @hookimpl
    def run_end(self, event: RunEnd) -> None:
        # On a full disk the run has ended with that error already.
        with contextlib.suppress(StorageError):
            self._write(event, "run_end", rollout_id=event.rollout_id, version=event.version, error=event.error)

    @hookimpl
    def update_weights_end(self, event: UpdateWeightsEnd) -> None:
        if event.report.compared_with is not None:
            compared_with = event.report.compared_with
            self._write(event, "weights_compared", version=event.report.version, compared_with=compared_with)

    @hookimpl
    def run_start(self, event: Event) -> None:
        self._write_fields(event, "rollout_id", "version")

    @hookimpl
    def run_ready(self, event: RunReady) -> None:
        self._write(event, "start_time", **fields_of(event.lap))

    @hookimpl
    def step_trained(self, event: StepTrained) -> None:
        if event.lap is not None:
            self._write(event, "step_time", rollout_id=event.rollout_id, **fields_of(event.lap))

    @hookimpl
    def checkpoint_saved(self, event: Event) -> None:
        self._write_fields(event, "rollout_id", "version", "seconds", "blocked_seconds")

    @hookimpl
    def engine_lost(self, event: Event) -> None:
        self._write_fields(event, "rollout_id", "error", "redispatched", engine="engine_index")

    @hookimpl
    def engine_restarted(self, event: Event) -> None:
        self._write_fields(event, "rollout_id", "pid", "restarts", "seconds", engine="engine_index")

    @hookimpl
    def engine_recovered(self, event: Event) -> None:
        self._write_fields(event, "rollout_id", "version", "seconds", engine="engine_index")

    @hookimpl
    def sample_failed(self, event: Event) -> None:
        names = {"group": "prompt.group_index", "sample": "sample_index", "tries": "attempt"}
        self._write_fields(event, "will_retry", "error", **names)

    @hookimpl
    def event_loop_blocked(self, event: EventLoopBlocked) -> None:
        # The name that it has had in files since 0.1.
        self._write(event, "loop_held", seconds=event.seconds, where=event.where)

    def _write_fields(self, event: Event, *fields: str, **renamed: str) -> None:
        """`renamed`: names in the file to the event's fields."""
        named = renamed | {field: field for field in fields}
        self._write(event, event.hook, **{name: attrgetter(field)(event) for name, field in named.items()})

    def _write(self, event: Event, name: str, **fields: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "attempt": event.run.attempt, "event": name}
        with written(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {key: plain(value) for key, value in fields.items()}) + "\n")


def fields_of(lap: Lap) -> dict[str, Any]:
    """`began` in seconds since the epoch; `spans` as [part, start, end] in seconds from it, those of a millisecond and more."""
    spans = [[part, round(start, 3), round(end, 3)] for part, start, end in lap.spans if end - start >= 0.001]
    return {"began": lap.began, "seconds": lap.seconds, "spans": spans}


def plain(value: Any) -> Any:
    """A value for JSON: errors as their text, seconds rounded to a millisecond."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return round(value, 3) if isinstance(value, float) else value
