"""Attention whose result for a query depends only on the keys that it sees, in the order of their positions.

Scores are sums of products in a tree over the head's width; softmax and the weighted values are sums over blocks of
keys, counted from the sequence's first. What is masked has weight 0, so padding behind the keys changes nothing.

Legend: S sequences, H query heads, K key heads, G query heads that share a key head, Lq and Lk padded lengths, D width
of queries and keys, E of values.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from slime_training.batch_invariant.sums import BLOCK, blocked_sum, tree_sum

PIECE: Final = 2**20
"""Products that exist at once; more would exceed the processor's caches."""
DEVICE_PIECE: Final = 2**26
"""The same on a GPU, which needs many at once: 256 MiB. The number does not change any bit."""


def attend(q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, scale: float, window: int | None = None) -> Tensor:
    """(S, H, Lq, D), (S, K, Lk, D), (S, K, Lk, E) to (S, H, Lq, E).

    A sequence's key at position p is at place p. `last_key` (S or 1, Lq) int64 is the last one that a query sees,
    `window` how many. The forward is computed in float32; the backward is the usual one.
    """
    out: Tensor = _Attend.apply(q, k, v, last_key.expand(len(q), -1), scale, window)  # type: ignore[no-untyped-call]
    return out


def keys_in_sight(last_key: Tensor, num_keys: int, window: int | None) -> Tensor:
    """(S, Lq) to (S, 1, 1, Lq, Lk) bool."""
    last = last_key[:, None, None, :, None]
    key = torch.arange(num_keys, device=last_key.device)
    return key <= last if window is None else (key <= last) & (key > last - window)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, scale: float, window: int | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, last_key)
        ctx.scale, ctx.window = scale, window
        sequences, heads, queries, width = q.shape
        out = q.new_empty((sequences, heads, queries, v.shape[-1]))
        each = heads * k.shape[2] * max(width, v.shape[-1])
        piece = PIECE if q.device.type == "cpu" else DEVICE_PIECE
        rows = max(1, min(queries, piece // each))
        together = max(1, piece // (each * rows))
        for first in range(0, sequences, together):
            some = slice(first, first + together)
            for start in range(0, queries, rows):
                part = slice(start, start + rows)
                seen = last_key[some, part]
                # Only whole blocks: keys that are left out would have weight 0.
                deepest = -(-(int(seen.max()) + 1) // BLOCK) * BLOCK
                out[some, :, part] = _piece(
                    q[some, :, part], k[some, :, :deepest], v[some, :, :deepest], seen, scale, window
                )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, last_key = ctx.saved_tensors
        (grad,) = grads
        shared = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        q5, grad5 = (by_key_head(x.to(wide), shared) for x in (q, grad))
        k5, v5 = k.to(wide)[:, :, None], v.to(wide)[:, :, None]
        scores = (q5 @ k5.transpose(-1, -2)) * ctx.scale
        weights = scores.masked_fill(~keys_in_sight(last_key, k.shape[2], ctx.window), -torch.inf).softmax(-1)
        of_weights = grad5 @ v5.transpose(-1, -2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * ctx.scale
        grad_q = (of_scores @ k5).flatten(1, 2)
        grad_k = (of_scores.transpose(-1, -2) @ q5).sum(2)
        grad_v = (weights.transpose(-1, -2) @ grad5).sum(2)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def by_key_head(x: Tensor, shared: int) -> Tensor:
    """(S, H, Lq, D) to (S, K, G, Lq, D)."""
    sequences, heads, queries, width = x.shape
    return x.reshape(sequences, heads // shared, shared, queries, width)


def _piece(q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, scale: float, window: int | None) -> Tensor:
    """`attend` without splitting into pieces."""
    shared = q.shape[1] // k.shape[1]
    # The summed dimension comes first: (D, S, K, G, Lq, Lk), then (Lk, S, K, G, Lq, E).
    wide = torch.promote_types(q.dtype, torch.float32)
    q_first = by_key_head(q.to(wide) * scale, shared).movedim(-1, 0)[..., None]
    k_first = k.to(wide).movedim(-1, 0)[:, :, :, None, None, :]
    scores = tree_sum(q_first * k_first)
    scores = scores.masked_fill(~keys_in_sight(last_key, k.shape[2], window), -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp().movedim(-1, 0).contiguous()
    v_first = v.to(wide).movedim(2, 0)[:, :, :, None, None, :]
    total = blocked_sum(weights[..., None] * v_first)
    return (total / blocked_sum(weights)[..., None]).flatten(1, 2).to(q.dtype)
