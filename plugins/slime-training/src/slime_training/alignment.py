"""Alignment of weights in memory.

MKL adds in another order where an operand begins at no multiple of 16 bytes: measured on AMD, with AVX-512 and without, for
float32 products `x @ w.T` of up to some thirty rows or into one column. Weights that are mapped from a file begin wherever its
header ends, so equal ones from two files, or from one and a trainer's memory, would differ in the last bit of what they give.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from torch import nn

ALIGNMENT: Final = 64
"""Bytes. torch's own CPU allocations are aligned to a multiple of it."""


def align(model: nn.Module) -> None:
    """Moves parameters and buffers that are not aligned. They stay the same objects."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()
