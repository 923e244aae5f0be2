"""Gathers rows of a packed stream, with bitwise reproducible gradients."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FEW: Final = 4
"""Highest number of repetitions of a row for which the backward reads the places where it went."""


class DeterministicGather(torch.autograd.Function):
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
        # Flattened to two dimensions: with more of them the CPU's index_add_ calls a kernel for every row.
        grad = grads[0].flatten(1).to(wide) if grads[0].dim() > 1 else grads[0].to(wide)[:, None]
        total = grad.new_zeros((ctx.shape[0], grad.shape[1]))
        if grad.is_cuda:
            # On a GPU index_add_ would use atomics, and index_put_ does so on the CPU.
            total.index_put_((rows,), grad, accumulate=True)
        else:
            total.index_add_(0, rows, grad)
        return total.to(grads[0].dtype).view(ctx.shape), None


class GatherUnique(DeterministicGather):
    """`DeterministicGather` for rows that are all different: the backward writes instead of adding."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.shape).index_copy_(0, rows, grads[0]), None


class GatherRepeated(torch.autograd.Function):
    """`DeterministicGather` for rows that repeat a few times only: the backward reads where each row went, without sorting and
    without atomics. The sums are the same, in the same order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """`places`: the result of `places_of`."""
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        grad = grads[0]
        total = grad.new_zeros(ctx.shape, dtype=torch.promote_types(grad.dtype, torch.float32))
        used = total[: places.shape[1]]
        for place in places:
            nowhere = (place < 0).view(-1, *[1] * (grad.dim() - 1))
            used += grad.index_select(0, place.clamp(min=0)).masked_fill_(nowhere, 0)
        return total.to(grad.dtype), None, None


def take(x: Tensor, rows: Tensor, places: Tensor | None) -> Tensor:
    """Returns x[rows]. `places`: the result of `places_of`, on the same device."""
    taken: Tensor = DeterministicGather.apply(x, rows) if places is None else GatherRepeated.apply(x, rows, places)  # type: ignore[no-untyped-call]
    return taken


def places_of(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """(L,) to (R, highest row + 1): the positions of each row in `rows`, first, second and so on; -1: none. None if a row
    occurs more than FEW times."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    times = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    most = int(times.max(initial=0)) + 1
    if most > FEW:
        return None
    places = np.full((most, int(rows.max(initial=-1)) + 1), -1, np.int64)
    places[times, ordered] = order
    return places
