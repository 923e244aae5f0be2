"""Execution: the result of running a piece of code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """`WRONG`: the code failed, and would fail again. `INFRA`: the sandbox failed, not the code."""

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
    """Standard error, with the traceback of an exception."""
    reason: str = ""
    """Why it is not `OK`, in one line."""
    seconds: float = 0.0
    walls: frozenset[str] = frozenset()
    """Walls that were in effect: `network`, `processes`, `files`, `bubblewrap`."""
