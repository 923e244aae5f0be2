"""Which parameters have moments of 8 bits, and how many elements share a scale."""

from __future__ import annotations

import math
from typing import Final

LARGEST: Final = 256
"""torchao's block, and that of the paper's successor bitsandbytes."""
SMALLEST: Final = 32
"""Scales of smaller blocks would be more than an eighth of the codes."""


def block_of(shape: tuple[int, ...], min_elements: int) -> int | None:
    """Elements of a block, which divides a row: the largest power of 2 up to 256; None: the moments stay float32. `shape`: of
    the whole parameter."""
    if len(shape) < 2 or math.prod(shape) < min_elements:
        return None
    block = math.gcd(shape[-1], LARGEST)
    return block if block >= SMALLEST else None
