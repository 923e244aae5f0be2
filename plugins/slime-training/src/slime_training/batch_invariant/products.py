"""Products of matrices whose rows depend neither on the number of rows nor on their position.

BLAS libraries choose another kernel for one row than for many, and add in another order. Here every product has the
same number of rows. Within one shape of product a row comes out the same in every place; that is a property of the
library, and `require_equal_rows` checks it on the machine.

Legend: M rows, B rows of a block, K and N columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from slime_core.errors import ModelError

BLOCK: Final = 48
"""Rows per product: a multiple of the rows that a kernel takes at once (6 in MKL's for AVX2 on Intel; 8 and 16 elsewhere),
since another kernel computes those that are left over."""

NARROWEST: Final = 16
"""Least number of columns of the right matrix: with fewer than twelve, MKL treats the rows of a block differently."""


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """(M, N) of (M, K) and (K, N)."""
    rows, columns = left.shape[0], right.shape[1]
    if columns < NARROWEST:
        right = torch.nn.functional.pad(right, (0, NARROWEST - columns))
    padded = -(-rows // BLOCK) * BLOCK
    source = left if padded == rows else torch.nn.functional.pad(left, (0, 0, 0, padded - rows))
    # A block of a slice would not be contiguous, unlike blocks of a new tensor.
    source = source.contiguous()
    result = torch.empty((padded, right.shape[1]), dtype=left.dtype, device=left.device)
    with one_thread() if left.device.type == "cpu" else nullcontext():
        for start in range(0, padded, BLOCK):
            torch.mm(source[start : start + BLOCK], right, out=result[start : start + BLOCK])
    return result[:rows, :columns]


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs products in the calling thread: several threads would split the columns differently."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_product(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * (left @ right)."""
    product = multiply(left, right)
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def multiply_each(left: Tensor, right: Tensor) -> Tensor:
    """(S, M, N) of (S, M, K) and (S, K, N)."""
    if left.shape[2] == 1:
        return left * right
    return torch.stack([multiply(a, b) for a, b in zip(left, right, strict=True)])


def product_shapes(model: nn.Module) -> set[tuple[int, int]]:
    """(outputs, inputs) of the weights of all linear layers."""
    return {(layer.out_features, layer.in_features) for layer in model.modules() if isinstance(layer, nn.Linear)}


def require_equal_rows(
    shapes: Iterable[tuple[int, int]], dtype: torch.dtype, device: torch.device | None = None
) -> None:
    """Raises ModelError if, in a product of a block with a weight of one of these shapes (N, K), the result depends on the
    position of a row. `device`: where products are computed; None: the CPU."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in sorted(set(shapes)):
        rows = torch.randn((BLOCK, inputs), generator=generator).to(device, dtype)
        weight = torch.randn((outputs, inputs), generator=generator).to(device, dtype)
        expected = multiply(rows, weight.t())
        for shift in (1, BLOCK // 2, BLOCK - 1):
            if not torch.equal(multiply(rows.roll(shift, 0), weight.t()).roll(-shift, 0), expected):
                kind = str(dtype).removeprefix("torch.")
                raise ModelError(
                    f"true_on_policy_mode: products of {BLOCK} rows with a weight of {outputs} x {inputs} in {kind} depend "
                    "on the position of a row, with this processor and this build of torch. Leave the mode off here."
                )
