"""Gathers the parts of many tensors by one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_training.key_gather import ALL_GATHER


def gather_jointly(mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """`mine` (sum of sizes,): this rank's parts of several tensors, concatenated. Returns for each tensor (R size,): the parts
    of all R ranks, by rank. All ranks call it, with the same sizes."""
    ranks = group.size()
    whole_sizes = [ranks * size for size in sizes]
    if ranks == 1:
        return tuple(mine.split_with_sizes(whole_sizes))
    everyone, found = (mine.new_empty(ranks * len(mine)) for _ in range(2))
    ALL_GATHER(everyone, mine, group=group)
    parts = tuple(found.split_with_sizes(whole_sizes))
    torch.split_with_sizes_copy(
        everyone.view(ranks, -1), list(sizes), dim=1, out=[part.view(ranks, -1) for part in parts]
    )
    return parts
