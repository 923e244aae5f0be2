"""Context parallelism: splits a packed micro-batch over the ranks of one CP group, in the zigzag layout.

Each sequence of length L is padded to 2 cp chunks of ceil(L / (2 cp)) tokens, and rank k holds chunks k and
2 cp - 1 - k, so that every rank has the same amount of causal attention to do. Long chunks are padded further, by a
sixteenth at most, to lengths that kernels of attention are built for (`padded_length`).

Legend: N packed tokens (padded), S sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.contracts.loss import Segments
from slime_core.types.batch import ragged_positions
from slime_core.types.microbatch import MicroBatch
from slime_training.attention_runs import LONG, padded_length
from slime_training.segments import LocalSegments


def split_micro_batch(micro: MicroBatch, cp_rank: int, cp_size: int) -> MicroBatch:
    """Returns the part of a whole micro-batch on the host that rank `cp_rank` of `cp_size` holds.

    `tokens` and `position_ids` are local, (N / cp,): of each sequence the lower chunk, then the upper one. Padding is token 0
    at the sequence's last position. `cu_seqlens` and `max_seqlen` stay those of the whole, padded stream (every offset a
    multiple of 2 cp). The response axis keeps the tokens that this rank's positions predict, in their order; `rows` holds their
    indices. `num_samples` is unchanged, so that every rank reduces over the same samples. Padding takes the last token's expert
    ids. Positions of several directions, (D, N), are cut along N. All images stay; the map from tokens to features is local
    too.
    """
    if micro.rows is not None:
        raise ValueError("the micro-batch is already one rank's part of another")
    # In numpy, and by index_select: torch would start all threads for a few thousand numbers, and the threads of several ranks
    # wait for each other (tens of milliseconds per operation).
    offsets = micro.cu_seqlens.numpy().astype(np.int64)
    starts, lengths = offsets[:-1], np.diff(offsets)
    chunks = -(-lengths // (2 * cp_size))
    chunks = np.where(chunks < LONG, chunks, padded_length(chunks))
    padded = np.concatenate([[0], (2 * cp_size * chunks).cumsum()])
    cu_seqlens = torch.from_numpy(padded.astype(np.int32))

    sequence = np.repeat(np.arange(len(lengths)), 2 * chunks)
    offset = held_positions(cu_seqlens, cp_rank, cp_size).numpy() - padded[sequence]
    real = torch.from_numpy(offset < lengths[sequence])
    # A padded position repeats the last real one: no position id exceeds the model's table.
    source = torch.from_numpy(starts[sequence] + np.minimum(offset, lengths[sequence] - 1))

    index = micro.logit_index.numpy()
    sequence = np.searchsorted(offsets[1:], index, side="right")
    offset = index - starts[sequence]
    number, within = np.divmod(offset, chunks[sequence])
    is_upper = number == 2 * cp_size - 1 - cp_rank
    held = np.flatnonzero((number == cp_rank) | is_upper)
    # Before this sequence the rank holds two chunks of each earlier sequence; before the upper chunk also the lower one.
    local = padded[sequence] // cp_size + within + np.where(is_upper, chunks[sequence], 0)
    rows = torch.from_numpy(held)
    return replace(
        micro,
        tokens=torch.where(real, micro.tokens.index_select(0, source), 0),
        position_ids=micro.position_ids.index_select(-1, source),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(2 * cp_size * chunks.max()),
        logit_index=torch.from_numpy(local[held]),
        targets=micro.targets.index_select(0, rows),
        segments=micro.segments.index_select(0, rows),
        mask=micro.mask.index_select(0, rows),
        columns=micro.columns.map_rows(rows, micro.tokens.device),
        rows=rows,
        images=None
        if micro.images is None
        else replace(
            micro.images, feature_of_token=torch.where(real, micro.images.feature_of_token.index_select(0, source), -1)
        ),
        routed_experts=None if micro.routed_experts is None else micro.routed_experts.index_select(0, source),
    )


def held_positions(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """(N / cp,) int64: positions in the whole padded stream of the tokens that a rank holds.

    `cu_seqlens` (S + 1,) on the host: offsets of the padded sequences, each a multiple of 2 cp.
    """
    offsets = cu_seqlens.numpy().astype(np.int64)
    chunks = np.diff(offsets) // (2 * cp_size)
    lower = offsets[:-1] + cp_rank * chunks
    upper = offsets[:-1] + (2 * cp_size - 1 - cp_rank) * chunks
    heads = np.stack([lower, upper], axis=1).ravel()
    return torch.from_numpy(ragged_positions(heads, np.repeat(chunks, 2)))


def segments_of(micro: MicroBatch, group: dist.ProcessGroup | None) -> Segments:
    """Of the response tokens that this rank holds of `micro`. `group`: the ranks that hold the others; None: there are none."""
    if group is None:
        return LocalSegments(micro.segments, micro.num_samples)
    return ZigzagSegments(micro.segments, micro.num_samples, group)


class ZigzagSegments:
    """`slime_core.contracts.loss.Segments` for ranks of `group` that hold parts of the same samples.

    `segments` (T',) int64 in [0, num_samples): the sample of each response token that this rank holds.
    """

    def __init__(self, segments: Tensor, num_samples: int, group: dist.ProcessGroup) -> None:
        self._segments = segments
        self._num_samples = num_samples
        self._group = group

    @property
    def num_samples(self) -> int:
        return self._num_samples

    def seq_sum(self, values: Tensor) -> Tensor:
        """(T',) to (S,), summed over the group. A collective, also in the backward."""
        local = values.new_zeros(self._num_samples).index_add(0, self._segments, values)
        summed: Tensor = _SumOverGroup.apply(local, self._group)  # type: ignore[no-untyped-call]
        return summed

    def expand(self, values: Tensor) -> Tensor:
        # Not values[segments]: the backward of indexing adds in a nondeterministic order.
        return values.index_select(0, self._segments)


class _SumOverGroup(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce: the step's loss is the sum of the ranks' losses, and each of them
    depends on every rank's input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
