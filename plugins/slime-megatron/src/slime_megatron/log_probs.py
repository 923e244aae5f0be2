"""The language-model head over a vocabulary that is sharded over ranks, a chunk of positions at a time.

Legend: T positions, C positions of a chunk, H hidden, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_training.head import ChunkedLMHead, EntropyMode, Found


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
    """Returns log softmax(z)[target] and, if requested, -sum p log p, float32 (T,), with z = h W' / temperature.

    `weight_VH` holds the vocabulary from `first` on; the ranks of `group` hold the rest (None: there is none). The
    gradient of `hidden_TH` is this rank's share. No (T, V) tensor outlives its chunk.
    """
    log_probs, entropies = VocabParallelLogProbs.apply(
        hidden_TH, weight_VH, targets_T, first, group, temperature, chunk, entropy
    )
    return log_probs, None if entropy == "none" else entropies


def total(x: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """All-reduces `x` in place."""
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
        head = head_of(weight_VH, temperature, chunk)
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs = torch.empty(len(targets_T), dtype=dtype, device=hidden_TH.device)
        log_sums, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        local_T, held_T = held_targets(targets_T, first, len(weight_VH))
        for part in head.parts(len(targets_T)):
            # A rank whose part is all padding has no logits.
            own_C = torch.full_like(log_probs[part], torch.finfo(dtype).min)
            chosen_C, entropies_C = torch.zeros_like(own_C), torch.zeros_like(own_C)
            if len(weight_VH):
                own_C, found_C, own_entropies_C = head.statistics(
                    hidden_TH[part], local_T[part], entropy=entropy != "none"
                )
                chosen_C = found_C.where(held_T[part], 0.0)
                entropies_C = entropies_C if own_entropies_C is None else own_entropies_C
            top_C = total(own_C.clone(), group, dist.ReduceOp.MAX)
            sums_2C = total(torch.stack([(own_C - top_C).exp(), chosen_C]), group)
            lse_C = top_C + sums_2C[0].log()
            log_sums[part] = lse_C
            log_probs[part] = sums_2C[1] - lse_C
            if entropy != "none":
                # The entropy of the mixture of the ranks' own distributions, each weighted by its part of the sum.
                weights_C = (own_C - lse_C).exp()
                entropies[part] = total(weights_C * (entropies_C + lse_C - own_C), group)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, log_probs, log_sums, entropies)
        ctx.first, ctx.temperature, ctx.chunk = first, temperature, chunk
        ctx.set_materialize_grads(False)
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, log_probs, log_sums, entropies = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden_TH)
        grad_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        if len(weight_VH):
            head = head_of(weight_VH, ctx.temperature, ctx.chunk)
            grad_hidden, grad_weight, *_ = head.gradients(
                hidden_TH,
                *held_targets(targets_T, ctx.first, len(weight_VH)),
                Found(log_probs_T=log_probs, log_sums_T=log_sums, entropies_T=entropies),
                *grads,
                of_weight=ctx.needs_input_grad[1],
                of_bias=False,
            )
        return grad_hidden, grad_weight, None, None, None, None, None, None


def head_of(weight_VH: Tensor, temperature: float, chunk: int) -> ChunkedLMHead:
    # Compiled, like Megatron's own small functions.
    return ChunkedLMHead(weight_VH=weight_VH, bias_V=None, temperature=temperature, chunk=chunk, fuse=weight_VH.is_cuda)


def held_targets(targets_T: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """(T,) int64 rows in this rank's part, and (T,) bool whether the target is in it."""
    local_T = targets_T - first
    return local_T.clamp(0, max(size - 1, 0)), (local_T >= 0) & (local_T < size)
