"""The language-model head at the requested positions: log-probs and entropy, a chunk of positions at a time.

Legend: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_training.head import ChunkedLMHead, EntropyMode, Found


def log_probs_of(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: EntropyMode,
    fuse: bool = False,
    added_VR: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns log softmax(z)[target] and, if requested, -sum p log p, float32 (T,), with z = (h W' + b) / temperature.

    `fuse`, `added_VR`: see `ChunkedLMHead`.
    """
    log_probs, entropies = LinearLogProbs.apply(
        hidden_TH, weight_VH, bias_V, targets_T, temperature, chunk, entropy, fuse, added_VR
    )
    return log_probs, None if entropy == "none" else entropies


class LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        chunk: int,
        entropy: EntropyMode,
        fuse: bool,
        added_VR: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        head = ChunkedLMHead(
            weight_VH=weight_VH, bias_V=bias_V, temperature=temperature, chunk=chunk, fuse=fuse, added_VR=added_VR
        )
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs = torch.empty(len(targets_T), dtype=dtype, device=hidden_TH.device)
        log_sums, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for part in head.parts(len(targets_T)):
            log_sums_C, chosen_C, entropies_C = head.statistics(
                hidden_TH[part], targets_T[part], entropy=entropy != "none"
            )
            log_sums[part] = log_sums_C
            log_probs[part] = chosen_C - log_sums_C
            if entropies_C is not None:
                entropies[part] = entropies_C
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, log_probs, log_sums, entropies, added_VR)
        ctx.temperature, ctx.chunk, ctx.fuse = temperature, chunk, fuse
        ctx.set_materialize_grads(False)
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, log_probs, log_sums, entropies, added_VR = ctx.saved_tensors
        head = ChunkedLMHead(
            weight_VH=weight_VH,
            bias_V=bias_V,
            temperature=ctx.temperature,
            chunk=ctx.chunk,
            fuse=ctx.fuse,
            added_VR=added_VR,
        )
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        found = Found(log_probs_T=log_probs, log_sums_T=log_sums, entropies_T=entropies)
        gradients = head.gradients(hidden_TH, targets_T, None, found, *grads, of_weight=of_weight, of_bias=of_bias)
        return *gradients[:3], None, None, None, None, None, gradients.added
