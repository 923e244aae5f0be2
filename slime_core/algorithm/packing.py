"""pack_micro_batch: packs samples into one MicroBatch of torch tensors."""

from __future__ import annotations

import numpy as np
import torch

from slime_core.contracts.media import MediaPacker
from slime_core.errors import DataError
from slime_core.types.batch import Batch, Int64, TokenColumns, ragged_positions, ragged_rows
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

    Without samples: one dummy token and T = 0, so that the rank takes part in the collectives of forward and backward.
    """
    if pixels is None and batch.images is not None:
        raise DataError("data.multimodal_keys: not set, but samples have images. Set it to their column.")
    total = batch.total_length[samples].astype(np.int64)
    response = batch.response_length[samples].astype(np.int64)
    prompt = batch.prompt_length[samples].astype(np.int64)
    tokens = batch.tokens[ragged_rows(batch.total_length, samples)]
    response_rows = batch.response_rows(samples)
    given = {} if columns is None else columns.only(LossColumns.__dataclass_fields__).take(response_rows).present()
    # Token t of a response is at P + t, so the position that predicts it is the one before.
    response_in_stream = ragged_positions(np.cumsum(total) - total + prompt, response)
    if len(tokens) == 0:
        tokens, total = np.zeros(1, np.int32), np.ones(1, np.int64)
    return MicroBatch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        position_ids=torch.from_numpy(ragged_positions(np.zeros_like(total), total)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(total)]).astype(np.int32)),
        max_seqlen=int(total.max()),
        logit_index=torch.from_numpy(response_in_stream - 1),
        targets=torch.from_numpy(tokens[response_in_stream].astype(np.int64)),
        segments=torch.from_numpy(np.repeat(np.arange(len(samples), dtype=np.int64), response)),
        num_samples=len(samples),
        mask=torch.from_numpy(batch.mask[response_rows].astype(np.bool_)),
        columns=LossColumns(
            rollout_log_probs=torch.from_numpy(batch.rollout_log_probs[response_rows]),
            **{name: torch.from_numpy(column) for name, column in given.items()},
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
