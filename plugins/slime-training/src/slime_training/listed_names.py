"""Names of tensors in an error: the first of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LISTED: Final = 8


def listed(names: Sequence[str]) -> str:
    """The first eight, and how many there are beside them."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
