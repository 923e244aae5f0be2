"""Attention where no kernel takes a packed stream as it is: segments of like length are padded to one rectangle.

Legend: S segments of a rectangle (see SegmentTable), Lq and Lk their padded lengths; H query heads, K key heads, D and D'
head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from slime_training.attention_kernels import attend_short
from slime_training.segment_table import Int64

MAX_STRETCH: Final = 1.25
FREE_TOKENS: Final = 8
"""Sequences share a rectangle while the longest is at most this much longer than the shortest. One SDPA call costs about as
much as this many padded tokens."""
SHORT_SCORES: Final = 2048
"""Scores per segment and head up to which a CPU computes masked attention by its formula: SDPA's kernel for masks calls tiny
matrix products one by one and gains nothing from threads (measured 21 against 4 ms for 768 segments of 11 x 19)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rectangle:
    """Of S segments."""

    num_segments: int
    query_length: int
    key_length: int

    def shaped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(S Lq, H, D), (S Lk, K, D), (S Lk, K, D') to (S, H, Lq, D), (S, K, Lk, D), (S, K, Lk, D')."""
        lengths = (self.query_length, self.key_length, self.key_length)
        q, k, v = (
            x.unflatten(0, (self.num_segments, length)).transpose(1, 2)  # type: ignore[no-untyped-call]
            for x, length in zip((q, k, v), lengths, strict=True)
        )
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """(S Lq, H, D), (S Lk, K, D), (S Lk, K, D') to (S Lq, H, D'). `mask`: (S or 1, 1, Lq, Lk) bool, keys in sight; None:
        those up to the query's own place."""
        q, k, v = self.shaped(q, k, v)
        if mask is not None and not q.is_cuda and self.query_length * self.key_length <= SHORT_SCORES:
            out = attend_short(q, k, v, mask, scale)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).flatten(0, 1)


def far_apart(one: float, other: float) -> bool:
    """Whether padding the shorter of two lengths to the longer would waste more than a rectangle of its own costs."""
    return max(one, other) > min(one, other) * MAX_STRETCH + FREE_TOKENS


def padded_rows(starts: Int64, lengths: Int64, padded: int) -> Int64:
    """(S,), (S,) to (S padded,): starts[i], starts[i] + 1, …, the last of `lengths[i]` repeated until there are `padded`."""
    offset = np.minimum(np.arange(padded), lengths[:, None] - 1)
    rows: Int64 = (starts[:, None] + offset).ravel()
    return rows
