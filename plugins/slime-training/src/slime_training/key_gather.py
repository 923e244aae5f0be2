"""Gathers keys and values over a context-parallel group.

Legend: N tokens that this rank holds, M of all ranks, K key heads, D and D' head dims.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

# Renamed in torch 2.13.
ALL_GATHER: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Final = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_keys(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """(N, K, D) and (N, K, D') of every rank, concatenated by rank: (M, K, D), (M, K, D')."""
    both: Tensor = GatherOverGroup.apply(torch.cat([k, v], dim=-1), group)  # type: ignore[no-untyped-call]
    return both[..., : k.shape[-1]], both[..., k.shape[-1] :]


class GatherOverGroup(torch.autograd.Function):
    """All-gather along dim 0. The gradient of each part is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        ALL_GATHER(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        REDUCE_SCATTER(out, grad, group=ctx.group)
        return out, None
