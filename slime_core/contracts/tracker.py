"""Tracker: logs metrics. It never changes what is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.contracts.driver import Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The run that a tracker logs."""

    name: str
    run_dir: Path
    config: Mapping[str, Any]
    """The resolved config, as JSON types."""
    attempt: int
    """1 for the first start, one more for each resume."""
    resumed_at: int | None
    """First rollout id of a resumed run: drop what was logged for it and later. None: not resumed."""


class Tracker(ABC):
    """One instance per run, in the driver's process. A failure stops the run: missing metrics would go unnoticed."""

    @abstractmethod
    def start(self, run: RunInfo) -> None: ...

    @abstractmethod
    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        """axis: `train/step`, `rollout/step` or `eval/step`; step: on that axis, from 0; metrics: names have their prefix."""

    @abstractmethod
    def finish(self) -> None:
        """Called once at the end of the run, also if it fails."""


class TrackerDriver(Driver[Tracker]):
    """Chosen by `trackers`, of which a run can have several."""
