"""From logits to the next tokens, for all rows at once.

Shapes: N rows · V vocabulary · W columns in sight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_core.types.completion import SamplingParams
from slime_local.random_draws import uniforms


@dataclass(frozen=True, slots=True)
class Special:
    """What at least one running row asks for beyond temperature sampling; the rest of the code is skipped."""

    greedy: bool = False
    truncated: bool = False
    """top_k or top_p."""
    penalized: bool = False
    delayed: bool = False
    """min_new_tokens."""
    stop_text: bool = False

    @classmethod
    def of(cls, params: set[SamplingParams]) -> Special:
        return cls(
            greedy=any(p.temperature == 0 for p in params),
            truncated=any(p.top_k > 0 or p.top_p < 1 for p in params),
            penalized=any(p.repetition_penalty != 1 for p in params),
            delayed=any(p.min_new_tokens > 0 for p in params),
            stop_text=any(p.stop for p in params),
        )


@dataclass(frozen=True, slots=True)
class Draw:
    """How to sample each row, (N,) each."""

    keys: Tensor
    """int64, see `random_draws`."""
    positions: Tensor
    """int64, of the new token in its sequence, counted from the prompt's first."""
    temperature: Tensor
    """float32; 1 for greedy rows."""
    greedy: Tensor
    """bool."""
    top_p: Tensor
    """float32."""
    top_k: Tensor
    """int64; V for all."""
    penalty: Tensor
    """float32."""


def sample(
    logits_NV: Tensor,
    draw: Draw,
    special: Special,
    *,
    seen_NV: Tensor | None,
    barred_NV: Tensor | None,
    log_softmax: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Tokens (N,) int64 and their log-probs (N,) float32.

    Order as in transformers: repetition penalty over `seen_NV` (prompt and response), `barred_NV` tokens out,
    temperature, top-k, top-p over what top-k kept. The log-prob is log_softmax(logits / temperature) over the full
    vocabulary and before penalty, bars and truncation: what a trainer computes for the token from the same weights.
    One uniform number per row, looked up in the cumulative distribution in vocabulary order, decides.
    """
    scaled = logits_NV / draw.temperature[:, None]
    log_probs = log_softmax(scaled)
    kept = log_probs
    if seen_NV is not None or barred_NV is not None:
        kept = logits_NV
        if seen_NV is not None:
            penalty = draw.penalty[:, None]
            kept = torch.where(seen_NV, torch.where(kept > 0, kept / penalty, kept * penalty), kept)
        if barred_NV is not None:
            kept = kept.masked_fill(barred_NV, -torch.inf)
        kept = log_softmax(kept / draw.temperature[:, None])
    probs = kept.exp()
    if special.truncated:
        probs = _truncate(probs, draw.top_k, draw.top_p)
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    # 52 bits: u * total stays below the total after rounding, and the first entry above it has a probability above 0.
    target = uniforms(draw.keys, draw.positions)[:, None] * cumulative[:, -1:]
    # Logits of weights that have diverged are NaN: the last token is drawn, with NaN as log-prob, and the trainer reports it.
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)
    if special.greedy:
        tokens = torch.where(draw.greedy[:, None], kept.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], log_probs.gather(1, tokens)[:, 0]


def _truncate(probs_NV: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zeros all but the `top_k` likeliest tokens, and of these all but the fewest that hold `top_p` of their mass."""
    ordered, order = torch.sort(probs_NV, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs_NV.shape[1], device=probs_NV.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], 0)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    # A row with top_p = 1 keeps its tail although the mass before it may round up to the total.
    outside = (before >= top_p[:, None].double() * ordered.sum(-1, keepdim=True)) & (top_p < 1)[:, None]
    ordered = ordered.masked_fill(outside, 0)
    return torch.zeros_like(probs_NV).scatter_(1, order, ordered)
