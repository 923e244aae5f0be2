"""Seeded sampling that does not depend on the other requests of a batch.

SGLang samples a whole batch by one of two functions. It uses the one that sorts as soon as a request in the batch has a
top-k or a top-p; greedy requests have a top-k of 1. Both add noise to log-probs that is hashed from seed, position and
column; but columns are tokens in one and ranks in the other, so a request's tokens depend on the other requests.

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
"""Action of /weights_checker that fails if sampling depends on the batch."""


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
    """Wraps SGLang's function that sorts, and returns tokens (N,) int32 sampled from `probs` (N, V). The probabilities that
    top-k and top-p keep are put back in token order, and SGLang's other function samples from them."""
    if sampling_seed is None or need_min_p_sampling:
        asked = {"return_filtered_probs": True} if return_filtered_probs else {}
        return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **asked)
    from sglang.srt.layers.sampler import sampling_from_probs_torch

    # Stable: the first of equal probabilities, as argmax chooses if all requests are greedy.
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    rank = torch.arange(probs.shape[-1], device=probs.device)
    # Rounding may make the sum before the tail exceed 1; without a top-p no token is removed.
    outside = (before > top_ps[:, None]) & (top_ps < 1)[:, None]
    ranked = ranked.masked_fill(outside | (rank >= top_ks[:, None]), 0)
    left = torch.zeros_like(probs).scatter_(-1, order, ranked)
    tokens = sampling_from_probs_torch(left, sampling_seed=sampling_seed, positions=positions)
    if not return_filtered_probs:
        return tokens
    chosen = left.gather(-1, tokens[:, None].to(torch.int64))[:, 0]
    return tokens, ranked, order.to(torch.int32), chosen


def draws_by_token() -> bool:
    """Whether SGLang's function is wrapped by `draw_by_token` in this process."""
    from sglang.srt.layers import sampler

    return hasattr(getattr(sampler, SORTED, None), "__wrapped__")
