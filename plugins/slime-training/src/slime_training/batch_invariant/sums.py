"""Sums in a fixed tree of additions, and functions built on them.

Legend: C elements that are summed over, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
"""Elements of a block of `blocked_sum`."""


def tree_sum(x: Tensor) -> Tensor:
    """(C, ...) to (...): adds the two halves until one element is left, so the order depends only on C."""
    count = x.shape[0]
    if count == 0:
        return x.new_zeros(x.shape[1:])
    while count > 1:
        half = count // 2
        added = x[:half] + x[half : 2 * half]
        x = added if count % 2 == 0 else torch.cat([added, x[2 * half :]])
        count = x.shape[0]
    return x[0]


def blocked_sum(x: Tensor) -> Tensor:
    """(C, ...) to (...): adds blocks of BLOCK elements one after the other. Zeros behind the last element change nothing,
    unlike in a tree over all elements."""
    missing = -x.shape[0] % BLOCK
    if missing:
        x = torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
    total = x.new_zeros(x.shape[1:])
    for start in range(0, x.shape[0], BLOCK):
        total = total + tree_sum(x[start : start + BLOCK])
    return total


def sum_of_last(x: Tensor) -> Tensor:
    """(..., C) to (...)."""
    # Halves of the first dimension are contiguous.
    return tree_sum(x.movedim(-1, 0).contiguous())


def log_sum_exp(x: Tensor) -> Tensor:
    """(..., V) to (...)."""
    highest = x.amax(-1, keepdim=True)
    return highest[..., 0] + sum_of_last((x - highest).exp()).log()


def log_softmax(x: Tensor) -> Tensor:
    """(..., V) to (..., V)."""
    return x - log_sum_exp(x)[..., None]
