"""Products of rows that are ordered by group, each group with a matrix of its own: one kernel for all of them, if there is one.

Legend: E groups, N rows, K features of a row, M of a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

ALIGNED: Final = 8
"""Elements of two bytes: the kernel requires rows of a multiple of 16 bytes."""
HOPPER: Final = 9
"""Major compute capability."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Number of rows in each group, which may be 0."""

    counts: Tensor
    """(E,) integers, on the host or the device"""
    ends: Tensor
    """(E,) int32, on the device: the row behind each group's last one"""

    @staticmethod
    def of(counts: Tensor, device: torch.device) -> Groups:
        ends = counts.cumsum(0).to(torch.int32).to(device, non_blocking=True)
        return Groups(counts=counts, ends=ends)

    def times(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """(N, K) with (E, K, M): (N, M)."""
        if in_one_kernel(rows, matrices):
            return torch.nn.functional.grouped_mm(rows, matrices, offs=self.ends)
        sizes = self.counts.tolist()
        found = rows.new_empty((len(rows), matrices.shape[-1]))
        for part, matrix, product in zip(rows.split(sizes), matrices, found.split(sizes), strict=True):
            torch.mm(part, matrix, out=product)
        return found

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Sums over each group's rows, (N, M) with (N, K): (E, M, K); zero for a group without rows."""
        if in_one_kernel(left, right):
            # Columns of the left and rows of the right factor are contiguous: the only layout in which groups may begin at any
            # row, and be empty.
            found = torch.nn.functional.grouped_mm(left.mT, right, offs=self.ends)
            if torch.cuda.get_device_capability(left.device)[0] == HOPPER:
                return found
            # From Blackwell on, the kernel writes nothing for a group without rows (pytorch issue 172439).
            empty = torch.diff(self.ends, prepend=self.ends.new_zeros(1)) == 0
            return found.masked_fill_(empty[:, None, None], 0.0)
        sizes = self.counts.tolist()
        found = left.new_empty((len(sizes), left.shape[1], right.shape[1]))
        for one, other, product in zip(left.split(sizes), right.split(sizes), found, strict=True):
            torch.mm(one.mT, other, out=product)
        return found


def in_one_kernel(*operands: Tensor) -> bool:
    """Whether torch's own grouped product is used: it computes in bfloat16 on GPUs; elsewhere it is a loop too, or refuses."""
    return all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.numel() and not any(size % ALIGNED for size in x.shape[1:])
        for x in operands
    )


class GroupedProduct(torch.autograd.Function):
    """Multiplies rows (N, K) with the matrix (M, K) of their group: (N, M). torch's own gradient is not used: it does not
    accept an expanded one, and without a kernel autograd would build a gradient of all matrices for each of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        """`weight`: (E, M, K)"""
        ctx.save_for_backward(rows, weight)
        ctx.groups = groups
        return groups.times(rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        return (
            ctx.groups.times(grad, weight) if ctx.needs_input_grad[0] else None,
            ctx.groups.outer(grad, rows) if ctx.needs_input_grad[1] else None,
            None,
        )
