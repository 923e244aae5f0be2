"""EventLog: events.jsonl in the run folder, what happened to a run. {"time", "attempt", "event", …} a line.

Steps and their numbers are in metrics.jsonl. Unlike that, this file is never cut: it tells of attempts that were lost too.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slime_core.atomic_io.storage import storage_error
from slime_core.contracts.hookspecs import (
    CheckpointSaved,
    EngineLost,
    EngineRecovered,
    EngineRestarted,
    Event,
    LoopHeld,
    PublishEnd,
    RunEnd,
    RunStart,
    SampleFailed,
    hookimpl,
)
from slime_core.errors import StorageError


class EventLog:
    """An observer. A line is written before the run goes on; StorageError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @hookimpl
    def run_start(self, event: RunStart) -> None:
        self._write(event, "run_start", rollout_id=event.rollout_id, version=event.version)

    @hookimpl
    def run_end(self, event: RunEnd) -> None:
        # On a full disk the run has ended for that very reason, which is the news.
        with contextlib.suppress(StorageError):
            self._write(event, "run_end", rollout_id=event.rollout_id, version=event.version, error=told(event.error))

    @hookimpl
    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        self._write(
            event,
            "checkpoint_saved",
            rollout_id=event.rollout_id,
            version=event.version,
            seconds=round(event.seconds, 3),
            blocked_seconds=round(event.blocked_seconds, 3),
        )

    @hookimpl
    def publish_end(self, event: PublishEnd) -> None:
        if event.report.compared_with is not None:
            compared_with = event.report.compared_with
            self._write(event, "weights_compared", version=event.report.version, compared_with=compared_with)

    @hookimpl
    def engine_lost(self, event: EngineLost) -> None:
        self._write(
            event,
            "engine_lost",
            rollout_id=event.rollout_id,
            engine=event.engine_index,
            error=told(event.error),
            redispatched=event.redispatched,
        )

    @hookimpl
    def engine_restarted(self, event: EngineRestarted) -> None:
        self._write(
            event,
            "engine_restarted",
            rollout_id=event.rollout_id,
            engine=event.engine_index,
            pid=event.pid,
            restarts=event.restarts,
            seconds=round(event.seconds, 3),
        )

    @hookimpl
    def engine_recovered(self, event: EngineRecovered) -> None:
        self._write(
            event,
            "engine_recovered",
            rollout_id=event.rollout_id,
            engine=event.engine_index,
            version=event.version,
            seconds=round(event.seconds, 3),
        )

    @hookimpl
    def sample_failed(self, event: SampleFailed) -> None:
        self._write(
            event,
            "sample_failed",
            group=event.prompt.group_index,
            sample=event.sample_index,
            tries=event.attempt,
            will_retry=event.will_retry,
            error=told(event.error),
        )

    @hookimpl
    def loop_held(self, event: LoopHeld) -> None:
        self._write(event, "loop_held", seconds=round(event.seconds, 3), where=event.where)

    def _write(self, event: Event, name: str, **told: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "attempt": event.run.attempt, "event": name, **told}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise storage_error(self._path, error) from error


def told(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"
