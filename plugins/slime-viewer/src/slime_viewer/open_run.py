"""OpenRun: a run's folder, as far as it has been read."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from slime_core.algorithm.metrics import ROLLOUT_AXIS
from slime_core.controller.run_folder import RunFolder
from slime_core.data.table import dumped_steps
from slime_core.errors import ConfigError, SlimeError
from slime_viewer.dumps import sample_sets
from slime_viewer.line_file import LineFile
from slime_viewer.metric_log import FILE as METRICS_FILE
from slime_viewer.metric_log import MetricLog
from slime_viewer.sample_set import SampleSet
from slime_viewer.token_text import Decoder, open_decoder
from slime_viewer.view_folder import TRAIN, ViewFolder

ATTEMPT_CONTINUES_S: Final = 900
"""A run on another host continues if any of its files changed in the last seconds."""


RECENT_STEPS: Final = 20
"""Steps whose mean time is that of the steps to come."""


class State(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    EMPTY = "empty"
    BROKEN = "broken"


class OpenRun:
    """Threads may ask; `lock` guards what is read on."""

    def __init__(self, name: str, path: Path, *, hf_checkpoint: Path | None = None) -> None:
        """`name`: of the run among those of the page. `hf_checkpoint`: folder of the tokenizer, instead of the run's."""
        self.id: Final = name
        self.folder: Final = RunFolder(path)
        self.view: Final = ViewFolder(path)
        self.lock: Final = threading.RLock()
        self.metrics: Final = MetricLog(path)
        self.events: list[dict[str, Any]] = []
        self.times: list[dict[str, Any]] = []
        self._hf_checkpoint = hf_checkpoint
        self._event_file = LineFile(self.folder.events)
        self._time_file = LineFile(self.view.times)
        self._sets: dict[str, SampleSet] = {}

    @property
    def path(self) -> Path:
        return self.folder.path

    def refresh(self) -> None:
        """Reads on."""
        with self.lock:
            self.metrics.refresh()
            for file, lines in ((self._event_file, self.events), (self._time_file, self.times)):
                anew, found = file.read_on()
                if anew:
                    lines.clear()
                lines.extend(found)

    def manifest(self) -> dict[str, Any]:
        """Empty without one that can be read."""
        try:
            return self.folder.read_manifest() or {}
        except SlimeError:
            return {}

    @property
    def config(self) -> Mapping[str, Any]:
        found = self.manifest().get("config", {})
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Waits for threads that index."""
        with self.lock:
            sets = list(self._sets.values())
        for found in sets:
            found.close()

    def sets(self) -> list[str]:
        return sample_sets(self.path)

    def sample_set(self, name: str) -> SampleSet:
        """ConfigError for a set that is not there, with those that are."""
        with self.lock:
            if name not in self._sets:
                there = self.sets()
                if name not in there:
                    known = f"there are {', '.join(there)}" if there else "this run has none"
                    raise ConfigError(f"{self.path}: no samples of {name!r}; {known}.")
                self._sets[name] = SampleSet(self.path, name)
            return self._sets[name]

    @cached_property
    def tokenizer(self) -> Decoder:
        """ModelError if it cannot be read; ConfigError if the run's model is not known. A model's own code is never run."""
        return open_decoder(self._hf_checkpoint or self.model_folder())

    def model_folder(self) -> Path:
        """The model that the run wrote, which has the tokenizer too, or the one that it began with."""
        model = self.config.get("model", {}).get("hf_checkpoint")
        candidates = [self.folder.hf, *([Path(model)] if isinstance(model, str) else [])]
        for folder in candidates:
            if folder.is_dir():
                return folder
        raise ConfigError(
            f"{self.path}: its model is not there, so its tokenizer is not known: --hf-checkpoint FOLDER."
        )

    # ------------------------------------------------------------ how it is

    def problem(self) -> str | None:
        """The first file that cannot be read as what slime writes."""
        if self.folder.manifest.exists():
            try:
                json.loads(self.folder.manifest.read_text(errors="replace"))
            except (ValueError, OSError) as error:
                return f"{self.folder.manifest.name} cannot be read: {error}"
        broken = [self.metrics.problem, self._event_file.problem, self._time_file.problem]
        return next((problem for problem in broken if problem), None)

    def state(self) -> State:
        starts = [event for event in self.events if event.get("event") in ("run_start", "run_end")]
        if starts:
            last = starts[-1]
            if last["event"] == "run_start":
                return State.RUNNING if self._continues(last) else State.STOPPED
            error = last.get("error")
            if error is None:
                return State.FINISHED
            return State.STOPPED if str(error).startswith(("Interrupted", "Terminated")) else State.FAILED
        if self.problem():
            return State.BROKEN
        if self.metrics.axes or self.sets():
            return State.FINISHED
        return State.EMPTY

    def _continues(self, start: Mapping[str, Any]) -> bool:
        """Whether the process of the last attempt is there."""
        try:
            holder = json.loads((self.path / ".lock").read_text())
            host, pid = str(holder["host"]), int(holder["pid"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if host == socket.gethostname():
            return process_exists(pid)
        newest = self.changed()
        return newest is not None and datetime.now().timestamp() - newest < ATTEMPT_CONTINUES_S

    def changed(self) -> float | None:
        """When the newest of its files changed, in seconds since the epoch."""
        files = [self.path / METRICS_FILE, self.folder.events, self.view.times, self.folder.rollouts, self.view.groups]
        found = [status.st_mtime for file in files if (status := status_of(file)) is not None]
        return max(found, default=None)

    def summary(self) -> dict[str, Any]:
        """An entry of `/api/runs`."""
        self.refresh()
        with self.lock:
            problem = self.problem()
            state = State.BROKEN if problem else self.state()
            rollout = self.metrics.axes.get(ROLLOUT_AXIS)
            starts = [event for event in self.events if event.get("event") == "run_start"]
            sets = self.sets()
            ended = [event.get("error") for event in self.events[-1:] if event.get("event") == "run_end"]
            return {
                "id": self.id,
                "name": str(self.config.get("name") or self.path.name),
                "folder": str(self.path),
                "state": state,
                "problem": problem or (str(ended[0]) if ended and ended[0] is not None else None),
                "started": seconds_of(starts[0].get("time")) if starts else None,
                "changed": self.changed(),
                "attempts": len(starts),
                "steps": 0 if rollout is None or not len(rollout.rollout) else int(max(rollout.rollout)) + 1,
                "num_rollout": self.config.get("train", {}).get("num_rollout"),
                "step_seconds": self.step_seconds(),
                "has": {
                    "metrics": bool(self.metrics.axes),
                    "samples": TRAIN in sets,
                    "tokens": any(dumped_steps(place) for place in (self.view.tokens, self.folder.train_data)),
                    "evals": any(name != TRAIN for name in sets),
                    "timeline": bool(self.times) or rollout is not None,
                    "events": bool(self.events),
                },
            }

    def step_seconds(self) -> float | None:
        """Of the last steps, evaluations and checkpoints included."""
        found = self.metrics.column(ROLLOUT_AXIS, "perf/step_time")
        times = [] if found is None else [value for value in found[-RECENT_STEPS:].tolist() if value == value]
        return sum(times) / len(times) if times else None

    def marks(self) -> dict[str, str]:
        """A text for each part of the page's data that changes with it."""
        files: dict[str, Sequence[Path]] = {
            "run": (self.folder.events, self.folder.manifest, self.folder.summary, self.path / ".lock"),
            "metrics": (self.path / METRICS_FILE,),
            "samples": (self.folder.rollouts, self.view.groups, self.view.tokens),
            "evals": (self.view.evals, *(self.view.evals.iterdir() if self.view.evals.is_dir() else ())),
            "timeline": (self.view.times, self.path / METRICS_FILE, self.folder.events),
            "events": (self.folder.events,),
        }
        marks = {part: ".".join(mark_of(file) for file in paths) for part, paths in files.items()}
        marks["run"] += str(self._continues({}))
        return marks


def status_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def mark_of(path: Path) -> str:
    status = status_of(path)
    return "-" if status is None else f"{status.st_ino:x}:{status.st_size:x}:{status.st_mtime_ns:x}"


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def seconds_of(text: Any) -> float | None:
    """Seconds since the epoch of a time in events.jsonl."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
