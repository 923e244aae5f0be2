"""Notes of a translation: what is left out of the run file, or changed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEFT_OUT_CODE: Final = 9
"""Exit code of a translation that leaves out what changes the training."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note on a flag or key that is left out of the run file, or changed."""

    flag: str
    text: str
    trains: bool
    """Whether this may change the training."""


def exit_code(notes: Sequence[Note], *, lenient: bool) -> int:
    return LEFT_OUT_CODE if any(note.trains for note in notes) and not lenient else 0


def report(notes: Sequence[Note]) -> None:
    """Prints the notes on stderr, those that change the training first."""
    if not notes:
        return
    print("left out of the run file, or changed:", file=sys.stderr)
    for note in sorted(notes, key=lambda note: not note.trains):
        mark = "CHANGES THE TRAINING  " if note.trains else ""
        print(f"  {mark}{note.flag}: {note.text}", file=sys.stderr)
