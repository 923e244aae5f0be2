"""Segments on one rank, which has the whole response of every sample."""

from __future__ import annotations

from torch import Tensor


class LocalSegments:
    """`segments` (T,) int64 in [0, num_samples)."""

    def __init__(self, segments: Tensor, num_samples: int) -> None:
        self._segments = segments
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def seq_sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_samples).index_add(0, self._segments, values)

    def expand(self, values: Tensor) -> Tensor:
        # index_select: the backward of indexing may add in a nondeterministic order on several threads.
        return values.index_select(0, self._segments)
