"""Matrix products on a CPU whose rows do not depend on how many there are: SGLang's batch-invariant mode, without Triton.

BLAS libraries choose another kernel for one row than for many, and add in another order. Here every product has the
same number of rows. Legend: M rows, B rows of a block, K and N columns.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
"""Measured on tiny models: a product of 32 rows takes as long as one of a few."""


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """(M, N) of (M, K) and (K, N)."""
    rows = left.shape[0]
    padded = -(-rows // BLOCK) * BLOCK
    source = left if padded == rows else torch.nn.functional.pad(left, (0, 0, 0, padded - rows))
    result = torch.empty((padded, right.shape[1]), dtype=left.dtype, device=left.device)
    for start in range(0, padded, BLOCK):
        # The variant with an output is another op, and stays what it was.
        torch.ops.aten.mm.out(source[start : start + BLOCK], right, out=result[start : start + BLOCK])
    return result[:rows]


def add_product(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * (left @ right)."""
    product = multiply(left, right)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def use_row_blocks() -> torch.library.Library:
    """For all products of matrices in this process, for as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", multiply, "CPU")
    library.impl("addmm", add_product, "CPU")
    return library
