"""Discounted sums over the tokens of each sample, from its last one backwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.types.batch import Float64


def discounted_sums(
    values: npt.NDArray[np.floating[Any]],
    lengths: npt.NDArray[np.integer[Any]],
    mask: npt.NDArray[np.bool_ | np.integer[Any]],
    decay: float,
) -> Float64:
    """y_t = x_t + decay x y_(t+1), with t counting the masked-in tokens of a sample alone; (M,) to (M,), float64.

    `lengths`: (S,) response lengths of the samples; their sum is M. Masked-out tokens cost no decay and get 0, and their
    values, even NaN, are not used.

    One vector operation over the samples for each position, counted from their ends. No power of `decay` is computed, so
    long responses neither overflow nor lose digits, and decay 1 gives plain sums.
    """
    rows_of_tokens = np.flatnonzero(mask)
    sample_of_row = np.repeat(np.arange(len(lengths)), lengths)
    num_tokens = np.bincount(sample_of_row[rows_of_tokens], minlength=len(lengths))
    order = np.argsort(-num_tokens, kind="stable")
    last_token = np.cumsum(num_tokens)[order] - 1
    # Number of samples that have a token at each distance from their last one; they are the first ones in `order`.
    distances = np.arange(num_tokens.max(initial=0))
    num_alive = len(lengths) - np.searchsorted(np.sort(num_tokens), distances, side="right")

    token_values = values[rows_of_tokens].astype(np.float64)
    carry = np.zeros(len(lengths), dtype=np.float64)
    for distance, alive in enumerate(num_alive.tolist()):
        tokens = last_token[:alive] - distance
        carry = token_values[tokens] + decay * carry[:alive]
        token_values[tokens] = carry
    sums = np.zeros(len(values), dtype=np.float64)
    sums[rows_of_tokens] = token_values
    return sums
