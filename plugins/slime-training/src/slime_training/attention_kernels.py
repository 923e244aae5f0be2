"""Attention over segments: the GPU kernels, and the plain formula for short segments on a CPU.

Legend: N queries and M keys of a packed stream; L tokens of one sequence; S segments in a block, Lq and Lk their padded
lengths; H query heads, K key heads, D and D' head dims.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_training.attention_runs import Run
from slime_training.long_attention import attend_long


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Run], *, scale: float | None, left: int = -1
) -> Tensor:
    """Causal attention, (N, H, D), (M, K, D), (M, K, D') to (N, H, D'). `left`: keys before its own that a query sees; -1:
    all."""
    if len(runs) == 1:
        return attend_run(q, k, v, runs[0], scale, left)
    return torch.cat([attend_run(q[run.queries], k[run.keys], v[run.keys], run, scale, left) for run in runs])


def attend_run(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float | None, left: int) -> Tensor:
    """`attend_packed` for the queries and keys of one run."""
    if run.is_long and left == -1:
        out = attend_long(q, k, v, scale)
        if out is not None:
            return out
    return attend_varlen(q, k, v, run, scale, left)


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, run: Run, scale: float | None, left: int) -> Tensor:
    """`attend_packed` for one run, by the variable-length kernel."""
    from torch.nn.attention.varlen import varlen_attn

    width = v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))
    extra: dict[str, Any] = {}
    # Before torch 2.13 the kernel accepts grouped heads without a flag.
    if q.shape[1] != k.shape[1] and varlen_asks_for_groups():
        extra["enable_gqa"] = True
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        run.cu_queries,
        run.cu_keys,
        run.max_queries,
        run.max_keys,
        scale=scale,
        window_size=(left, 0),
        **extra,
    )
    assert isinstance(out, Tensor)  # a tuple with log-sum-exps only on request
    return out[..., :width]


@cache
def varlen_asks_for_groups() -> bool:
    """Whether the kernel requires `enable_gqa`, which came with torch 2.13."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def attend_short(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    """(S, H, Lq, D), (S, K, Lk, D), (S, K, Lk, D') to (S, H, Lq, D'), by the plain formula.

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
