"""Events of an engine with their decode steps, from which another engine can form the same batches."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class EventKind(StrEnum):
    SUBMIT = "submit"
    """Requests entered together, in this order."""
    ABORT = "abort"
    """Running or waiting requests were aborted."""
    VERSION = "version"
    """Weights became active."""
    RESTART = "restart"
    """A new process started: steps are counted from 0 again."""


class EngineEvent(NamedTuple):
    """One event of an engine."""

    at: int
    """Decode steps of the engine before it."""
    kind: EventKind
    names: tuple[str, ...] = ()
    """Ids of the requests."""
    version: int = -1
