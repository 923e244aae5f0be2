"""SegmentTable: which queries of a packed stream see which keys.

A segment is a run of queries with the keys up to its end: a whole sequence, one zigzag chunk of it, a prompt, or an
response that reads a prompt that other responses read too. Its last query is at its last key.

Legend: S segments, N tokens of the stream, M keys that its attention may read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slime_core.types.batch import ragged_positions
from slime_training.context_parallel import held_positions

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentTable:
    """Integers on the host, int64."""

    query_starts: Int64
    """(S,) row of each segment's first query in the stream; its queries follow each other."""
    query_lengths: Int64
    """(S,) at least 1."""
    key_lengths: Int64
    """(S,) at least as long as the queries."""
    key_rows: Int64 | None = None
    """(sum of key_lengths,) rows among the M keys, segment after segment; None: a segment's keys are its queries."""

    @property
    def square(self) -> npt.NDArray[np.bool_]:
        """(S,) True for as many keys as queries: a plain causal mask is enough."""
        same: npt.NDArray[np.bool_] = self.key_lengths == self.query_lengths
        return same

    def key_starts(self) -> Int64:
        """(S,) offset of each segment's keys in `key_rows`."""
        starts: Int64 = np.cumsum(self.key_lengths) - self.key_lengths
        return starts


def whole_sequences(cu_seqlens: Tensor) -> SegmentTable:
    """`cu_seqlens` (S + 1,) int32 on the CPU."""
    offsets = cu_seqlens.numpy().astype(np.int64)
    lengths = np.diff(offsets)
    return SegmentTable(query_starts=offsets[:-1], query_lengths=lengths, key_lengths=lengths)


def zigzag_part(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> SegmentTable:
    """Two chunks of each sequence; the keys are those of all ranks of the group, one rank after the other.

    `cu_seqlens` (S + 1,) int32 on the CPU: offsets of the whole, padded sequences.
    """
    offsets = cu_seqlens.numpy().astype(np.int64)
    chunks = np.diff(offsets) // (2 * cp_size)
    query_lengths = np.repeat(chunks, 2)
    key_lengths = np.stack([(cp_rank + 1) * chunks, (2 * cp_size - cp_rank) * chunks], axis=1).ravel()
    # Index of each token of the whole stream in the concatenation of the ranks' parts.
    held = torch.cat([held_positions(cu_seqlens, rank, cp_size) for rank in range(cp_size)]).numpy()
    gathered = np.empty_like(held)
    gathered[held] = np.arange(len(held))
    return SegmentTable(
        query_starts=np.cumsum(query_lengths) - query_lengths,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        key_rows=gathered[ragged_positions(np.repeat(offsets[:-1], 2), key_lengths)],
    )
