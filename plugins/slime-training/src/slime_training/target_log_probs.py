"""Log-probs of several targets at a position, a chunk of positions at a time: the logits of a position are computed once.

Legend: P positions, C positions of a chunk, T targets, R targets of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime_training.head import ChunkedLMHead, HeadSums, scaled


class TargetLogProbs(torch.autograd.Function):
    """Called as `apply` with the arguments of `forward`. Returns log softmax(z)[target] and, without gradient, the entropy at
    its position, float32 (T,). places_T: the position of each target, ascending. Targets of a position may be equal."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        added_VR: Tensor | None,
        targets_T: Tensor,
        places_T: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        head = head_of(hidden_PH, weight_VH, bias_V, added_VR, temperature, chunk)
        wide = torch.promote_types(hidden_PH.dtype, torch.float32)
        log_probs = torch.empty(len(targets_T), dtype=wide, device=hidden_PH.device)
        log_sums = torch.empty(len(hidden_PH), dtype=wide, device=hidden_PH.device)
        entropies = torch.empty_like(log_sums)
        for part, rows in chunks(head, len(hidden_PH), places_T):
            z_CV = scaled(head.logits(hidden_PH[part]), temperature)
            log_sums[part] = z_CV.logsumexp(-1)
            log_p_CV = z_CV.sub_(log_sums[part, None])
            log_probs[rows] = log_p_CV[places_T[rows] - part.start, targets_T[rows]]
            entropies[part] = -(log_p_CV.exp() * log_p_CV).sum(-1)
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, added_VR, targets_T, places_T, log_sums)
        ctx.temperature, ctx.chunk = temperature, chunk
        of_target = entropies.index_select(0, places_T)
        ctx.mark_non_differentiable(of_target)
        return log_probs, of_target

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, added_VR, targets_T, places_T, log_sums = ctx.saved_tensors
        head = head_of(hidden_PH, weight_VH, bias_V, added_VR, ctx.temperature, ctx.chunk)
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        sums = HeadSums(head, hidden_PH, log_sums.dtype, of_weight=of_weight, of_bias=of_bias)
        for part, rows in chunks(head, len(hidden_PH), places_T):
            hidden_CH = hidden_PH[part]
            log_p_CV = scaled(head.logits(hidden_CH), ctx.temperature).sub_(log_sums[part, None])
            places_R, given_R = places_T[rows] - part.start, grads[0][rows].to(log_p_CV.dtype)
            taken_C = added_at(log_p_CV.new_zeros(len(log_p_CV)), places_R, given_R)
            grad_CV = log_p_CV.exp_().mul_(-taken_C[:, None])
            added_at(grad_CV.view(-1), places_R * grad_CV.shape[1] + targets_T[rows], given_R)
            sums.add(part, hidden_CH, grad_CV.div_(ctx.temperature).to(hidden_PH.dtype))
        found = sums.gradients()
        return found.hidden, found.weight, found.bias, found.added, None, None, None, None


def head_of(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    added_VR: Tensor | None,
    temperature: float,
    chunk: int,
) -> ChunkedLMHead:
    # No longer than the positions: `chunks` counts in it.
    chunk = max(1, min(chunk, len(hidden_PH)))
    return ChunkedLMHead(
        weight_VH=weight_VH, bias_V=bias_V, temperature=temperature, chunk=chunk, fuse=False, added_VR=added_VR
    )


def chunks(head: ChunkedLMHead, positions: int, places_T: Tensor) -> Iterator[tuple[slice, slice]]:
    """Positions of each chunk, and its targets."""
    starts = torch.arange(0, positions + head.chunk, head.chunk, device=places_T.device)
    bounds = torch.searchsorted(places_T, starts).tolist()
    for number, part in enumerate(head.parts(positions)):
        yield part, slice(bounds[number], bounds[number + 1])


def added_at(total: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """`total`, (N,), with `values` added at `places`, which may repeat, in a fixed order."""
    if total.is_cuda:
        # On a GPU index_add_ would use atomics, and index_put_ does so on the CPU.
        return total.index_put_((places,), values, accumulate=True)
    return total.index_add_(0, places, values)
