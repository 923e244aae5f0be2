"""The language-model head at the positions that are asked for: log-probs and entropy, a chunk of positions at a time.

Legend: T positions, C positions of a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_core.training.head import EntropyMode, scaled_logits


def log_probs_of(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    *,
    temperature: float,
    chunk: int,
    entropy: EntropyMode,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(z)[target] and, if asked for, -sum p log p, float32 (T,), with z = (h W' + b) / temperature.

    No (T, V) tensor outlives its chunk: the backward computes each chunk's logits again.
    """
    log_probs, entropies = LinearLogProbs.apply(hidden_TH, weight_VH, bias_V, targets_T, temperature, chunk, entropy)
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
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_probs = torch.empty(len(targets_T), dtype=dtype, device=hidden_TH.device)
        log_sums, entropies = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for start in range(0, len(targets_T), chunk):
            part = slice(start, start + chunk)
            z_CV = scaled_logits(hidden_TH[part], weight_VH, bias_V, temperature)
            lse_C = z_CV.logsumexp(-1)
            log_sums[part] = lse_C
            log_probs[part] = z_CV.gather(-1, targets_T[part, None])[:, 0] - lse_C
            if entropy != "none":
                log_p_CV = z_CV.sub_(lse_C[:, None])
                entropies[part] = -(log_p_CV.exp() * log_p_CV).sum(-1)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, log_sums, entropies)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, targets_T, log_sums, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grads
        # The chunks' shares of the weight gradient are added in float32.
        wide = log_sums.dtype
        many = len(targets_T) > ctx.chunk
        grad_hidden = torch.zeros_like(hidden_TH)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_VH, dtype=wide if many else None)
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        for start in range(0, len(targets_T), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_CH = hidden_TH[part]
            log_p_CV = scaled_logits(hidden_CH, weight_VH, bias_V, ctx.temperature).sub_(log_sums[part, None])
            factor_CV = torch.zeros_like(log_sums[part, None])
            if grad_log_probs is not None:
                factor_CV = -grad_log_probs[part, None]
            if grad_entropies is not None:
                # dH/dz_v = -p_v (log p_v + H)
                factor_CV = factor_CV - (log_p_CV + entropies[part, None]) * grad_entropies[part, None]
            grad_CV = log_p_CV.exp_().mul_(factor_CV)
            if grad_log_probs is not None:
                grad_CV.scatter_add_(-1, targets_T[part, None], grad_log_probs[part, None])
            if ctx.temperature != 1.0:
                grad_CV.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VH.dtype)
            grad_hidden[part] = grad_CV @ weight_VH
            if grad_weight is None:
                continue
            if many:
                grad_weight += grad_CV.t() @ hidden_CH
            else:
                grad_weight = grad_CV.t() @ hidden_CH
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None
