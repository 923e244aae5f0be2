"""Upstream's functions of context parallelism. The driver has whole samples, so nothing is gathered or cut."""

from __future__ import annotations

from typing import Any


def all_gather_with_cp(tensor: Any, total_length: int, response_length: int) -> Any:
    """tensor: (R,), returned as it is."""
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int, *more: Any, **options: Any) -> Any:
    """log_prob: (R,), returned as it is."""
    return log_prob
