"""Order: which groups of a dumped step come first."""

from __future__ import annotations

from enum import StrEnum


class Order(StrEnum):
    """What `--sort` takes."""

    DRAWN = "drawn"
    WORST = "worst"
    BEST = "best"
    SPREAD = "spread"
    LONGEST = "longest"
