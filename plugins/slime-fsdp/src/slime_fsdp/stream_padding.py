"""Fills the stream of a micro-batch for products in float8, which contract over 16 elements at a time: over features, and over
tokens for the gradient of a weight. A sequence that nothing reads is added behind the last token."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import torch

from slime_core.types.microbatch import MicroBatch
from slime_training.segment_table import SegmentTable

MULTIPLE: Final = 16


def padded(micro: MicroBatch, table: SegmentTable) -> tuple[MicroBatch, SegmentTable]:
    """The stream, (N,) tokens on the CPU, with a last sequence that fills it up to a multiple. `table`: of the same stream."""
    num_tokens = len(micro.tokens)
    more = -num_tokens % MULTIPLE
    if not more:
        return micro, table
    positions = torch.arange(more, dtype=micro.position_ids.dtype)
    wide = replace(
        micro,
        tokens=torch.cat([micro.tokens, micro.tokens[:1].expand(more)]),
        position_ids=torch.cat([micro.position_ids, positions]),
        cu_seqlens=torch.cat([micro.cu_seqlens, micro.cu_seqlens.new_tensor([num_tokens + more])]),
        max_seqlen=max(micro.max_seqlen, more),
    )
    rows = np.arange(num_tokens, num_tokens + more)
    return wide, SegmentTable(
        query_starts=np.append(table.query_starts, num_tokens),
        query_lengths=np.append(table.query_lengths, more),
        key_lengths=np.append(table.key_lengths, more),
        key_rows=None if table.key_rows is None else np.append(table.key_rows, rows),
    )
