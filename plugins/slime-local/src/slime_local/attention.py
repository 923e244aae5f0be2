"""Attention over keys and values that end in one common column, registered with transformers as `slime_local`.

Shapes: B sequences · H query heads · K key heads · P prompt columns · W columns in sight · D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from slime_core.errors import ModelError
from slime_training.attention_variants import variants_asked
from slime_training.batch_invariant.attention import attend as invariant_attention

NAME: Final = "slime_local"
INVARIANT: Final = "slime_local_invariant"
"""The same, batch-invariant."""

Computed = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, int | None], Tensor]
"""query (B, H, P, D), key and value (B, K, W, D), mask, scale, sliding window to (B, P, H, D).

P > 1 is a prefill: W = P, the mask is boolean (B, 1, P, P), True where seen, None for plain causal. P = 1 is a decode step: the
mask is added to the scores, (B, 1, 1, W)."""


def for_transformers(compute: Computed) -> Callable[..., tuple[Tensor, None]]:
    """`compute` as transformers calls attention. Raises ModelError for variants of attention that are not implemented, rather
    than leave them out."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if asked := variants_asked(options):
            raise ModelError(
                f"engine local: {type(module).__name__} asks for attention with {', '.join(asked)}; the embedded engine does "
                "not implement it. Use another engine for this model."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return compute(query, key, value, attention_mask, scale, sliding_window), None

    return attend


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sliding_window: int | None
) -> Tensor:
    """Attention of a prefill or a decode step; see `Computed`."""
    of_phase = _decode if query.shape[2] == 1 else _prefill
    return of_phase(query, key, value, mask, scale, sliding_window)


def attention_invariant(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sliding_window: int | None
) -> Tensor:
    """`attention` with `slime_training.batch_invariant`, where a key's place is its position in the sequence."""
    columns, queries = key.shape[2], query.shape[2]
    position = torch.arange(columns, device=key.device)
    start = torch.zeros(len(query), dtype=torch.int64, device=key.device)
    if mask is not None:
        # The last query of a row sees all of its sequence, and nothing in front of it.
        last = mask[:, 0, -1]
        start = (columns - (last if last.dtype == torch.bool else last == 0).long().sum(-1)).expand(len(query))
        moved = (position + start[:, None]).clamp(max=columns - 1)[:, None, :, None]
        key, value = (x.gather(2, moved.expand(-1, x.shape[1], -1, x.shape[3])) for x in (key, value))
    last_key = (position[columns - queries :] - start[:, None]).clamp(min=0)
    return invariant_attention(query, key, value, last_key, scale, sliding_window).transpose(1, 2)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, sliding_window: int | None
) -> Tensor:
    if sliding_window is not None and key.shape[2] > sliding_window:
        key, value = key[:, :, -sliding_window:], value[:, :, -sliding_window:]
        bias = None if bias is None else bias[..., -sliding_window:]
    b, h, _, d = query.shape
    k = key.shape[1]
    # The heads that share a key head become rows of one small matrix product: no key is repeated.
    grouped = query.reshape(b, k, h // k, d)
    if query.is_cuda:
        mask = None if bias is None else bias.expand(b, k, h // k, -1)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(grouped * scale, key.transpose(2, 3)).float()
        if bias is not None:
            scores += bias
        # torch's softmax runs one row at a time; over rows this short the plain formula measured 5 times as fast.
        weights = (scores - scores.amax(-1, keepdim=True)).exp_()
        weights /= weights.sum(-1, keepdim=True)
        out = torch.matmul(weights.to(value.dtype), value)
    return out.reshape(b, 1, h, value.shape[-1])


def _prefill(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scale: float, sliding_window: int | None
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    p = query.shape[2]
    if sliding_window is not None and p > sliding_window:
        column = torch.arange(p, device=query.device)
        distance = column[:, None] - column[None, :]
        band = (distance >= 0) & (distance < sliding_window)
        seen = band if seen is None else seen & band
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale)
    return out.transpose(1, 2).contiguous()


# transformers looks attention up by name in a table of the process; a name of our own cannot disturb other models.
# Nothing is entered in its table of masks, so the masks given to the model reach `attention` unchanged.
AttentionInterface.register(NAME, for_transformers(attention))
AttentionInterface.register(INVARIANT, for_transformers(attention_invariant))
