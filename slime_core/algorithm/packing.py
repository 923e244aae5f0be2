"""Samples of a shard to one packed MicroBatch of torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from slime_core.contracts.media import MediaPacker
from slime_core.errors import DataError
from slime_core.types.batch import Batch, Int64, TokenColumns, ragged_rows
from slime_core.types.microbatch import LossColumns, MicroBatch
from slime_core.types.routed_experts import unread


def pack_micro_batch(
    batch: Batch,
    samples: Int64,
    *,
    columns: TokenColumns | None = None,
    temperature: float = 1.0,
    pixels: MediaPacker | None = None,
) -> MicroBatch:
    """Packs these samples of `batch`, in this order, with their rows of `columns`. `pixels`: for a batch with images.

    No samples: one dummy token and T = 0, so that the ranks still meet in the collectives of a forward and backward.
    """
    if pixels is None and batch.images is not None:
        raise DataError("data.multimodal_keys: samples have images, and the run names no column of any. Set it.")
    total = batch.total_length[samples].astype(np.int64)
    response = batch.response_length[samples].astype(np.int64)
    prompt = batch.prompt_length[samples].astype(np.int64)
    tokens = batch.tokens[ragged_rows(batch.total_length, samples)]
    starts = np.concatenate([[0], np.cumsum(total)])
    response_rows = batch.response_rows(samples)
    # Token t of a response stands at P + t, so the position that predicts it is the one before.
    response_in_stream = ragged_positions(starts[:-1] + prompt, response)
    if len(tokens) == 0:
        tokens, starts = np.zeros(1, np.int32), np.array([0, 1])
        positions = np.zeros(1, np.int64)
    else:
        positions = ragged_positions(np.zeros_like(total), total)
    return MicroBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int(total.max(initial=1)),
        logit_index=torch.from_numpy(response_in_stream - 1),
        targets=torch.from_numpy(tokens[response_in_stream].astype(np.int64)),
        segments=torch.from_numpy(np.repeat(np.arange(len(samples), dtype=np.int64), response)),
        num_samples=len(samples),
        mask=torch.from_numpy(batch.mask[response_rows].astype(np.bool_)),
        columns=LossColumns(
            rollout_log_probs=torch.from_numpy(batch.rollout_log_probs[response_rows]),
            **{} if columns is None else to_torch(columns.take(response_rows)),
        ),
        temperature=temperature,
        images=None if pixels is None else pixels.pack(batch, samples),
        samples=tuple(samples.tolist()),
        routed_experts=None if batch.routed_experts is None else expert_ids(batch, samples),
    )


def expert_ids(batch: Batch, samples: Int64) -> torch.Tensor:
    """(N, layers, top_k) uint8 or int32"""
    assert batch.routed_experts is not None
    _, layers, top_k = batch.routed_experts.shape
    rows = batch.routed_experts[ragged_rows(batch.total_length, samples)]
    if not len(rows):
        rows = np.array(unread(1, layers, top_k))
    return torch.from_numpy(rows if rows.dtype == np.uint8 else rows.astype(np.int32))


def ragged_positions(starts: Int64, lengths: Int64) -> Int64:
    """starts[i], starts[i] + 1, … for `lengths[i]` numbers each, one after the other."""
    before = np.cumsum(lengths) - lengths
    offsets: Int64 = np.repeat(starts - before, lengths)
    return np.arange(lengths.sum(), dtype=np.int64) + offsets


def to_torch(columns: TokenColumns) -> dict[str, torch.Tensor]:
    loss_inputs = LossColumns.__dataclass_fields__
    return {name: torch.from_numpy(column) for name, column in columns.present().items() if name in loss_inputs}
