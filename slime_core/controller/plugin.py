"""The kernel's own tracker, registered like any plugin's."""

from __future__ import annotations

from typing import Any

from slime_core.contracts.tracker import Tracker, TrackerDriver


class JsonlDriver(TrackerDriver):
    """metrics.jsonl in the run folder: one JSON object per step and axis."""

    @classmethod
    def build(cls, config: Any) -> Tracker:
        from slime_core.controller.jsonl import JsonlTracker

        return JsonlTracker()
