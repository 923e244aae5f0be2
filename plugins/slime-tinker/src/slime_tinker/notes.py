"""Notes for who runs the server, on stderr: what it serves on after, and what needs room or repair."""

from __future__ import annotations

import contextlib
import sys
from datetime import datetime


def note(text: str) -> None:
    # stderr may be a file on the disk that is full.
    with contextlib.suppress(OSError):
        print(f"{datetime.now():%Y-%m-%d %H:%M:%S} slime serve: {text}", file=sys.stderr, flush=True)
