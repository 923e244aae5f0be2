"""Draws by seed that do not depend on what a request is batched with.

SGLang samples a whole batch by one of two functions: by the other one, which sorts, as soon as a request in it has a top-k
or a top-p, and greedy ones have a top-k of 1. Both add noise to log-probs that is hashed from seed, position and column;
but the columns are tokens in one and ranks in the other, so that a request's tokens change with its company.

Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

SAMPLER: Final = "sglang.srt.layers.sampler"
SORTED: Final = "top_k_top_p_min_p_sampling_from_probs_torch"
DRAWS_BY_TOKEN: Final = "slime_draws"
"""An action of /weights_checker that fails where draws depend on the batch."""


def draw_by_token(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    *,
    return_filtered_probs: bool = False,
) -> Any:
    """(N,) int32 tokens of `probs` (N, V); around SGLang's function that sorts. What top-k and top-p leave goes back to the
    order of tokens, and SGLang's other function draws from it."""
    if sampling_seed is None or need_min_p_sampling:
        asked = {"return_filtered_probs": True} if return_filtered_probs else {}
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **asked)
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    # Stable: of equal ones the first, as argmax takes it where all requests are greedy.
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)
    # Rounding may bring the sum before the tail above 1, and without a top-p nothing is left out.
    outside = (before > top_ps[:, None]) & (top_ps < 1)[:, None]
    ranked = ranked.masked_fill(outside | (rank >= top_ks[:, None]), 0)
    left = torch.zeros_like(probs).scatter_(-1, order, ranked)
    tokens = sampling_from_probs_torch(left, sampling_seed=sampling_seed, positions=positions)
    if not return_filtered_probs:
        return tokens
    chosen = left.gather(-1, tokens[:, None].to(torch.int64))[:, 0]
    return tokens, ranked, order.to(torch.int32), chosen


def draws_by_token() -> bool:
    """Whether SGLang's function has the one above around it, in this process."""
    from sglang.srt.layers import sampler

    return hasattr(getattr(sampler, SORTED, None), "__wrapped__")
