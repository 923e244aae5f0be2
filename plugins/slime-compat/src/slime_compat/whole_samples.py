"""Upstream's functions of context parallelism, for callers with whole samples, of which nothing is gathered or cut."""

from __future__ import annotations

from typing import Any


def all_gather_with_cp(tensor: Any, total_length: int, response_length: int) -> Any:
    """tensor: (R,), returned as it is. ValueError for a part of a sample."""
    if len(tensor) != response_length:
        raise ValueError(
            f"all_gather_with_cp: this rank has {len(tensor)} of the sample's {response_length} tokens, and functions of "
            "upstream cannot gather the others. Leave out --context-parallel-size, or write a loss (slime.losses)"
        )
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int, *more: Any, **options: Any) -> Any:
    """log_prob: (R,), returned as it is."""
    return log_prob
