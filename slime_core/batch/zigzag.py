"""Context parallelism: a packed micro-batch cut over the ranks of one CP group, in the zigzag layout.

Each sequence of length L is padded to 2 cp chunks of ceil(L / (2 cp)) tokens, and rank k holds chunks k and
2 cp - 1 - k, so that every rank has the same amount of causal attention to do.

Legend: N packed tokens (padded), S sequences, T response tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.types.microbatch import MicroBatch


def split_micro_batch(micro: MicroBatch, cp_rank: int, cp_size: int) -> MicroBatch:
    """What rank `cp_rank` of `cp_size` holds of a whole micro-batch.

    `tokens` and `position_ids` are local, (N / cp,): of each sequence the lower chunk, then the upper one. Padding is
    token 0 at the sequence's last position. `cu_seqlens` and `max_seqlen` stay those of the whole, padded stream
    (every offset a multiple of 2 cp). The response axis keeps the tokens that this rank's positions predict, in their
    order; `rows` says which. `num_samples` is unchanged, so that every rank reduces over the same samples. Padding takes the
    last token's expert ids. Positions of several directions, (D, N), are cut along N. All images stay; which token stands for
    which feature is local too.
    """
    if micro.rows is not None:
        raise ValueError("the micro-batch is already one rank's part of another")
    starts = micro.cu_seqlens[:-1].long()
    lengths = micro.cu_seqlens.long().diff()
    chunks = -(-lengths // (2 * cp_size))
    padded_starts = torch.cat([chunks.new_zeros(1), (2 * cp_size * chunks).cumsum(0)])
    cu_seqlens = padded_starts.to(torch.int32)

    positions = held_positions(cu_seqlens, cp_rank, cp_size)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), 2 * chunks)
    offset = positions - padded_starts[sequence]
    real = offset < lengths[sequence]
    # A padded position takes the place of the last real one: no position id beyond the model's table.
    source = starts[sequence] + torch.minimum(offset, lengths[sequence] - 1)

    sequence = torch.searchsorted(micro.cu_seqlens[1:].long(), micro.logit_index, right=True)
    offset = micro.logit_index - starts[sequence]
    chunk = chunks[sequence]
    number = offset // chunk
    is_lower, is_upper = number == cp_rank, number == 2 * cp_size - 1 - cp_rank
    rows = (is_lower | is_upper).nonzero()[:, 0]
    # Below this sequence lie two chunks of each sequence before it; below the upper chunk also the lower one.
    local = padded_starts[:-1][sequence] // cp_size + offset % chunk + torch.where(is_upper, chunk, 0)
    return replace(
        micro,
        tokens=torch.where(real, micro.tokens[source], 0),
        position_ids=micro.position_ids[..., source],
        cu_seqlens=cu_seqlens,
        max_seqlen=int(2 * cp_size * chunks.max()),
        logit_index=local[rows],
        targets=micro.targets[rows],
        segments=micro.segments[rows],
        mask=micro.mask[rows],
        columns=micro.columns.map_rows(rows, micro.tokens.device),
        rows=rows,
        images=None
        if micro.images is None
        else replace(micro.images, feature_of_token=torch.where(real, micro.images.feature_of_token[source], -1)),
        routed_experts=None if micro.routed_experts is None else micro.routed_experts[source],
    )


def held_positions(cu_seqlens: Tensor, cp_rank: int, cp_size: int) -> Tensor:
    """(N / cp,) int64: where the tokens that a rank holds stand in the whole padded stream.

    `cu_seqlens` (S + 1,): offsets of the padded sequences, each a multiple of 2 cp.
    """
    starts = cu_seqlens[:-1].long()
    chunks = cu_seqlens.long().diff() // (2 * cp_size)
    lower = starts + cp_rank * chunks
    upper = starts + (2 * cp_size - 1 - cp_rank) * chunks
    heads = torch.stack([lower, upper], dim=1).flatten()
    counts = chunks.repeat_interleave(2)
    before = counts.cumsum(0) - counts
    total = int(counts.sum())
    return torch.arange(total, device=cu_seqlens.device) + torch.repeat_interleave(
        heads - before, counts, output_size=total
    )


class ZigzagSegments:
    """`slime_core.contracts.loss.Segments` where the ranks of `group` hold parts of the same samples.

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
        """(T',) to (S,), summed over the group. A collective, in the backward too."""
        local = values.new_zeros(self._num_samples).index_add(0, self._segments, values)
        summed: Tensor = _SumOverGroup.apply(local, self._group)  # type: ignore[no-untyped-call]
        return summed

    def expand(self, values: Tensor) -> Tensor:
        # Not values[segments]: its backward adds in any order.
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
