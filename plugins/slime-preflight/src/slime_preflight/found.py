"""Found: the result of one check of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum


class State(StrEnum):
    GOOD = "ok"
    NOTE = "note"
    """Fine for some runs."""
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of one check."""

    what: str
    state: State
    detail: str
    """Key `told` of the JSON output."""
    advice: str = ""
    """What to type."""


def found_json(found: Found) -> dict[str, str]:
    return {"told" if name == "detail" else name: value for name, value in asdict(found).items()}
