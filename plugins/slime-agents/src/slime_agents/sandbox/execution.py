"""Execution: what became of a piece of code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """`WRONG` is the code's own doing; it would end so again. `INFRA` says nothing about the code."""

    OK = "ok"
    WRONG = "wrong"
    TIMEOUT = "timeout"
    INFRA = "infra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    outcome: Outcome
    out: str = ""
    """Standard output, up to the limit."""
    err: str = ""
    """Standard error; of an exception, its traceback."""
    reason: str = ""
    """Why it is not `OK`, in a line."""
    seconds: float = 0.0
    walls: frozenset[str] = frozenset()
    """What held while it ran: `network`, `processes`, `files`, `bubblewrap`."""
