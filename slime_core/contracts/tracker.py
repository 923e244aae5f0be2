"""Tracker: writes metrics down. It observes; nothing it does changes a run's numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.contracts.driver import Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    name: str
    run_dir: Path
    config: Mapping[str, Any]
    """As resolved, JSON-like."""
    attempt: int
    """1 for the first start, one more for each resume."""
    resumed_at: int | None
    """Rollout id that a resumed run starts with: what was logged for it and later is to be dropped."""


class Tracker(ABC):
    """One instance per run, on the driver. Failures stop the run: a silent hole in the record is worse."""

    @abstractmethod
    def start(self, run: RunInfo) -> None: ...

    @abstractmethod
    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        """`axis` is `train/step`, `rollout/step` or `eval/step`; metric names carry their prefix."""

    @abstractmethod
    def finish(self) -> None: ...


class TrackerDriver(Driver[Tracker]):
    """Named in `trackers`."""
