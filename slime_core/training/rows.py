"""Rows of a packed stream, with gradients that are the same bits every time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Take(torch.autograd.Function):
    """x[rows] for rows that may repeat: the backward adds in a fixed order, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        # Two dimensions: with more of them the CPU's index_add_ calls a kernel for every row.
        grad = grads[0].flatten(1).to(wide) if grads[0].dim() > 1 else grads[0].to(wide)[:, None]
        total = grad.new_zeros((ctx.shape[0], grad.shape[1]))
        if grad.is_cuda:
            # index_add_ would use atomics here, and index_put_ does so on the CPU.
            total.index_put_((rows,), grad, accumulate=True)
        else:
            total.index_add_(0, rows, grad)
        return total.to(grads[0].dtype).view(ctx.shape), None
