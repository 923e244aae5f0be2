"""Attention of one long segment, by cuDNN's kernels.

Legend: L queries, M keys up to the last query's own, B = M - L keys before; H query heads, K key heads, D and D' head dims.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from slime_training.attention_runs import padded_length

FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def attend_long(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor | None:
    """(L, H, D), (M, K, D), (M, K, D') to (L, H, D'), causal; None if cuDNN does not compute it.

    With keys before the queries' own, L is a length that `padded_length` leaves as it is.
    """
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if not can_use_cudnn_attention(SDPAParams(queries, keys, values, None, 0.0, len(q) == len(k), grouped)):
        return None
    if len(q) < len(k):
        out: Tensor = AttendBehind.apply(queries, keys, values, scale)  # type: ignore[no-untyped-call]
    else:
        # No query sees the keys behind it: padding at the end changes nothing.
        more = int(padded_length(np.array(len(q)))) - len(q)
        queries, keys, values = (F.pad(x, (0, 0, 0, more)) if more else x for x in (queries, keys, values))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)[: len(q)]


class AttendBehind(torch.autograd.Function):
    """(1, H, L, D), (1, K, M, D), (1, K, M, D') to (1, H, L, D'): all queries see the B keys before, their own are causal.

    cuDNN's causal mask starts at the first key. So the two kinds of keys are two calls, whose outputs are weighed by their
    shares of the softmax's denominator (Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889); the backward of
    each is given the whole one's output and denominator.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        before = k.shape[2] - q.shape[2]
        seen, seen_lse, *seen_state = FORWARD(q, k[:, :, :before], v[:, :, :before], None, True, scale=scale)
        own, own_lse, *own_state = FORWARD(
            q, k[:, :, before:], v[:, :, before:], None, True, is_causal=True, scale=scale
        )
        lse = torch.logaddexp(seen_lse, own_lse)
        share = (own_lse - lse).exp_().view(*q.shape[:3], 1)
        out = torch.lerp(seen.float(), own.float(), share).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.states, ctx.scale = (seen_state, own_state), scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        before = k.shape[2] - q.shape[2]
        found = []
        for keys, state, causal in zip((slice(before), slice(before, None)), ctx.states, (False, True), strict=True):
            cu_queries, cu_keys, longest_query, longest_key, seed, offset, _ = state
            found.append(
                BACKWARD(
                    grads[0], q, k[:, :, keys], v[:, :, keys], out, lse, seed, offset, None,
                    cu_queries, cu_keys, longest_query, longest_key, 0.0, causal, scale=ctx.scale,
                )
            )  # fmt: skip
        (seen_q, seen_k, seen_v), (own_q, own_k, own_v) = found
        return seen_q + own_q, torch.cat([seen_k, own_k], dim=2), torch.cat([seen_v, own_v], dim=2), None
