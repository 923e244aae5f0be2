"""Run: neighbouring segments of a packed stream that one call of an attention kernel computes.

A segment is a run of queries with the keys up to its end; its last query is at its last key. Legend: S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int64 = npt.NDArray[np.int64]

LONG: Final = 4096
"""Queries from which a sequence gets a call of cuDNN's kernel for itself. On an H100, 32 heads, forward and backward: 14.6
against 23.8 ms for 16,384 tokens, 224 against 375 for 65,536; for sequences of 2,048 the two kernels take equally long."""
STEPS: Final = 16
"""Number of lengths between two powers of two for which cuDNN's kernel is used: each length requires a build of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """S segments."""

    queries: slice
    """Rows of the stream."""
    keys: slice
    cu_queries: Tensor
    """(S + 1,) int32, the first is 0."""
    cu_keys: Tensor
    max_queries: int
    max_keys: int
    is_long: bool = False
    """The run is one segment with a kernel call of its own: a sequence with all its keys, or a chunk behind others of its
    size."""


def runs_of(
    query_lengths: Int64, key_lengths: Int64, device: torch.device, *, long: int | None = None
) -> tuple[Run, ...]:
    """Cuts segments into runs. `query_lengths`, `key_lengths`: (S,) in the order of the stream. `long`: queries from which a
    sequence is a run of its own; None: there is one run."""
    alone = np.zeros(len(query_lengths), np.bool_)
    if long is not None:
        candidates = np.flatnonzero(query_lengths >= long)
        alone[candidates] = fits_long(query_lengths[candidates], key_lengths[candidates])
    cuts = [0, *(np.flatnonzero(alone[1:] | alone[:-1]) + 1).tolist(), len(alone)]
    queries, keys = (np.concatenate([[0], np.cumsum(lengths)]) for lengths in (query_lengths, key_lengths))
    return tuple(
        Run(
            queries=slice(int(queries[first]), int(queries[last])),
            keys=slice(int(keys[first]), int(keys[last])),
            cu_queries=torch.from_numpy((queries[first : last + 1] - queries[first]).astype(np.int32)).to(device),
            cu_keys=torch.from_numpy((keys[first : last + 1] - keys[first]).astype(np.int32)).to(device),
            max_queries=int(query_lengths[first:last].max()),
            max_keys=int(key_lengths[first:last].max()),
            is_long=bool(alone[first]),
        )
        for first, last in pairwise(cuts)
    )


def fits_long(query_lengths: Int64, key_lengths: Int64) -> npt.NDArray[np.bool_]:
    """(S,) bool: segments that can be padded to a length that kernels are built for. Whole sequences can, at their end. A chunk
    behind other keys cannot: the padding would come between its own keys and those before them."""
    built = (padded_length(query_lengths) == query_lengths) & (key_lengths % query_lengths == 0)
    fits: npt.NDArray[np.bool_] = built | (query_lengths == key_lengths)
    return fits


def padded_length(lengths: Int64) -> Int64:
    """Rounds each length (at least 1) up to the next of the STEPS lengths between two powers of two."""
    step = np.maximum(1 << np.maximum(np.frexp(lengths)[1] - 1, 0), STEPS) // STEPS
    padded: Int64 = -(-lengths // step) * step
    return padded


def long_on(device: torch.device) -> int | None:
    """`long` for `runs_of`, None on GPUs before Hopper, which have no faster kernel for long sequences."""
    return LONG if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) else None
