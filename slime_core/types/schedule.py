"""What came to an engine, and when: with it another engine puts the same batches together."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EventKind(StrEnum):
    SUBMIT = "submit"
    """Requests entered together, in this order."""
    ABORT = "abort"
    """Running or waiting requests were ended from outside."""
    VERSION = "version"
    """Weights became active."""
    RESTART = "restart"
    """A new process, in which nothing has run yet: steps are counted from 0 again."""


class EngineEvent(NamedTuple):
    """It happened after `at` decode steps of the engine."""

    at: int
    kind: EventKind
    names: tuple[str, ...] = ()
    """Ids of requests."""
    version: int = -1
