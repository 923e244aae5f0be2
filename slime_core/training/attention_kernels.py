"""Attention over segments: the variable-length kernel of GPUs, and the formula itself for short ones on a CPU.

Legend: N queries and M keys of a packed stream; S segments in a block, Lq and Lk their padded lengths; H query heads, K key
heads, D and D' head dims.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    scale: float | None,
    left: int = -1,
) -> Tensor:
    """(N, H, D), (M, K, D), (M, K, D') to (N, H, D'), causal. `left`: keys before its own that a query sees; -1: all."""
    from torch.nn.attention.varlen import varlen_attn

    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    extra: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if varlen_has_gqa():
            extra["enable_gqa"] = True
        else:
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        scale=scale,
        window_size=(left, 0),
        **extra,
    )
    assert isinstance(out, Tensor)  # with the log-sum-exps only where they are asked for
    return out[..., :width]


@cache
def varlen_has_gqa() -> bool:
    """enable_gqa came with torch 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """(S, H, Lq, D), (S, K, Lk, D), (S, K, Lk, D') to (S, H, Lq, D'), by the formula itself.

    The queries of the heads that share a key head are rows of one product: no key is repeated.
    """
    segments, heads, rows, width = q.shape
    key_heads, columns = k.shape[1:3]
    shared = heads // key_heads
    scale = width**-0.5 if scale is None else scale
    grouped = (q * scale).reshape(segments * key_heads, shared * rows, width)
    scores = torch.bmm(grouped, k.flatten(0, 1).transpose(1, 2)).view(segments, key_heads, shared, rows, columns)
    weights = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1)
    out = torch.bmm(weights.view(segments * key_heads, shared * rows, columns), v.flatten(0, 1))
    return out.view(segments, heads, rows, v.shape[-1])
