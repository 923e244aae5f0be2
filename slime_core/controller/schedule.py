"""schedule.jsonl: the events that decided the results of an asynchronous run. Another run can replay them bit for bit.

A line is the identity of the run (the first line), a new attempt, the events of an engine, the events of a pool, or a
checkpoint. A resumed run truncates the file at its checkpoint, and a replay ends with the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slime_core import __version__
from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.storage import written
from slime_core.contracts.collector import CollectorEvent
from slime_core.controller.manifest import differences
from slime_core.errors import ConfigError
from slime_core.types.schedule import EngineEvent, EventKind

SHOWN: Final = 8
"""Differences that an error names."""


@dataclass(frozen=True, slots=True)
class RecordedSchedule:
    """The schedule of a whole run, over all its attempts."""

    engines: Mapping[int, list[EngineEvent]] = field(default_factory=dict)
    pool: Sequence[CollectorEvent] = ()
    requests: Sequence[Mapping[str, Sequence[int]]] = ()
    """Up to each checkpoint: the engines of each request, one for each time that it was sent."""


class ScheduleFile:
    """Appended to after every step, and at every checkpoint."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, resumed_at: int | None) -> None:
        """`identity`: see `manifest.replay_identity`. `resumed_at`: the step of the checkpoint that the run continues
        from; None: it begins."""
        self._path = path
        kept = [] if resumed_at is None or not path.exists() else lines_up_to(path, resumed_at)
        lines = kept or [{"run": identity}]
        if resumed_at is not None:
            lines.append({"attempt": resumed_at})
            if not kept:
                broken = "there the run was resumed, and its schedule up to that checkpoint is missing"
                lines.append({"checkpoint": resumed_at, "broken": broken})
            elif changed := differences(kept[0].get("run", {}), identity):
                broken = f"there the run was resumed with other settings ({list_changes(changed)})"
                lines.append({"checkpoint": resumed_at, "broken": broken})
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))

    def add(self, engines: Mapping[int, Sequence[EngineEvent]], pool: Sequence[CollectorEvent]) -> None:
        """Appends the events since the last call."""
        self._append(lines_of(engines, pool))

    def checkpoint(
        self,
        rollout_id: int,
        engines: Mapping[int, Sequence[EngineEvent]],
        pool: Sequence[CollectorEvent],
        *,
        broken: str | None = None,
    ) -> None:
        """Like `add`; called before the checkpoint itself is written. `broken`: why the steps up to it cannot be replayed."""
        mark = {"checkpoint": rollout_id} | ({} if broken is None else {"broken": broken})
        self._append([*lines_of(engines, pool), mark])

    def _append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        before = self._path.stat().st_size if self._path.exists() else 0
        with written(self._path):
            try:
                with self._path.open("a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))
            except OSError:
                with contextlib.suppress(OSError):
                    # Else the next line would continue half a line.
                    os.truncate(self._path, before)
                raise


def lines_of(engines: Mapping[int, Sequence[EngineEvent]], pool: Sequence[CollectorEvent]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [{"engine": index, "events": events} for index, events in engines.items() if events]
    return [*lines, {"pool": pool}] if pool else lines


def lines_up_to(path: Path, rollout_id: int) -> list[dict[str, Any]]:
    """The lines up to a checkpoint; none if the file does not have it."""
    lines = whole_lines(path)
    for place, line in enumerate(lines):
        if line.get("checkpoint") == rollout_id:
            return lines[: place + 1]
    return []


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """All lines but a last one that a killed run left incomplete."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def list_changes(changed: Sequence[str]) -> str:
    return "; ".join(changed[:SHOWN]) + (f"; and {len(changed) - SHOWN} more" if len(changed) > SHOWN else "")


def read_schedule(path: Path, identity: Mapping[str, Any]) -> RecordedSchedule:
    """ConfigError if it is not one, or was recorded by a run of another identity (`manifest.replay_identity`)."""
    where = f"--replay-schedule {path}"
    try:
        lines = whole_lines(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where}: cannot be read: {error}. A run with --max-async-level 2 or more leaves one."
        ) from error
    if not lines or "run" not in lines[0]:
        raise ConfigError(
            f"{where}: does not begin with the run that it was recorded by: slime {__version__} cannot repeat it."
        )
    if changed := differences(lines[0]["run"], identity):
        raise ConfigError(
            f"{where}: recorded with other settings, plugins or data (recorded -> now): {list_changes(changed)}. Start with "
            "those that it was recorded with: config.toml beside it has them."
        )
    engines: defaultdict[int, list[EngineEvent]] = defaultdict(list)
    pool: list[CollectorEvent] = []
    requests: list[defaultdict[str, list[int]]] = [defaultdict(list)]
    # A run that was killed had continued from its last checkpoint, and no step records how far.
    last = max((place for place, line in enumerate(lines) if "checkpoint" in line), default=0)
    for line in lines[: last + 1]:
        if "broken" in line:
            raise ConfigError(f"{where}: cannot be repeated beyond step {line['checkpoint']}: {line['broken']}.")
        if "attempt" in line:
            for events in engines.values():
                events.append(EngineEvent(0, EventKind.RESTART))
        for at, kind, names, version in line.get("events", ()):
            engines[line["engine"]].append(EngineEvent(at, EventKind(kind), tuple(names), version))
            for name in names if kind == EventKind.SUBMIT else ():
                requests[-1][name].append(line["engine"])
        pool += line.get("pool", ())
        if "checkpoint" in line:
            requests.append(defaultdict(list))
    return RecordedSchedule(engines, pool, requests[:-1])
