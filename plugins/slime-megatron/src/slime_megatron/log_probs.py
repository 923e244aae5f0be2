"""The language-model head over a vocabulary that ranks share, a chunk of positions at a time.

Legend: T positions, C positions of a chunk, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.training.head import EntropyMode, scaled_logits


def log_probs_of(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    first: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk: int,
    entropy: EntropyMode,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z)[target] and, if asked for, -sum p log p, float32 (T,), with z = h W' / temperature.

    `weight_VH` holds the vocabulary from `first` on; the ranks of `group` hold the rest (None: there is none). The
    gradient of `hidden_TH` is this rank's share. No (T, V) tensor outlives its chunk.
    """
    log_probs, entropies = VocabParallelLogProbs.apply(
        hidden_TH, weight_VH, targets_T, first, group, temperature, chunk, entropy
    )
    return log_probs, None if entropy == "none" else entropies


def total(x: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """In place."""
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


class VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        first: int,
        group: dist.ProcessGroup | None,
        temperature: float,
        chunk: int,
        entropy: EntropyMode,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs = torch.empty(len(targets_T), dtype=dtype, device=hidden_TH.device)
        log_sums, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        size = len(weight_VH)
        for start in range(0, len(targets_T), chunk):
            part = slice(start, start + chunk)
            z_CV = scaled_logits(hidden_TH[part], weight_VH, None, temperature)
            # A rank whose part is all padding has no logits.
            lowest_C = z_CV.new_full((len(z_CV),), torch.finfo(dtype).min)
            top_C = total(z_CV.max(-1).values if size else lowest_C, group, dist.ReduceOp.MAX)
            local_C = targets_T[part] - first
            held_C = (local_C >= 0) & (local_C < size)
            chosen_C = torch.zeros_like(top_C)
            if size:
                chosen_C = z_CV.gather(-1, local_C.clamp(0, size - 1)[:, None])[:, 0].where(held_C, 0.0)
            sums_2C = total(torch.stack([(z_CV - top_C[:, None]).exp().sum(-1), chosen_C]), group)
            lse_C = top_C + sums_2C[0].log()
            log_sums[part] = lse_C
            log_probs[part] = sums_2C[1] - lse_C
            if entropy != "none":
                log_p_CV = z_CV.sub_(lse_C[:, None])
                entropies[part] = total(-(log_p_CV.exp() * log_p_CV).sum(-1), group)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, log_sums, entropies)
        ctx.first, ctx.temperature, ctx.chunk = first, temperature, chunk
        ctx.set_materialize_grads(False)
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grads
        # The chunks' shares of the weight gradient are added in float32.
        grad_weight = torch.zeros_like(weight_VH, dtype=log_sums.dtype) if ctx.needs_input_grad[1] else None
        grad_hidden = torch.zeros_like(hidden_TH)
        size = len(weight_VH)
        for start in range(0, len(targets_T) if size else 0, ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CH = hidden_TH[part]
            log_p_CV = scaled_logits(hidden_CH, weight_VH, None, ctx.temperature).sub_(log_sums[part, None])
            factor_CV = torch.zeros_like(log_sums[part, None])
            if grad_log_probs is not None:
                factor_CV = -grad_log_probs[part, None]
            if grad_entropies is not None:
                # dH/dz_v = -p_v (log p_v + H)
                factor_CV = factor_CV - (log_p_CV + entropies[part, None]) * grad_entropies[part, None]
            grad_CV = log_p_CV.exp_().mul_(factor_CV)
            if grad_log_probs is not None:
                local_C = targets_T[part] - ctx.first
                held_C = (local_C >= 0) & (local_C < size)
                chosen_C = grad_log_probs[part].where(held_C, 0.0)
                grad_CV.scatter_add_(-1, local_C.clamp(0, size - 1)[:, None], chosen_C[:, None])
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden[part] = grad_CV @ weight_VH
            if grad_weight is not None:
                grad_weight += grad_CV.t() @ hidden_CH
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None, None
