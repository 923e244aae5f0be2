"""DynamicFilterOutput: what old filters return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """Returned by old filters instead of True or False."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False
