"""Sharded parameters whole again: one collective for many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime_core.training.key_gather import ALL_GATHER


# Without it each part of a tensor would go through an autograd function on the host.
@torch.no_grad()
def gathered(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Those that FSDP has cut along dim 0 as they are on every rank together, the others as they came. All ranks call, with
    the same names. `dtype`: what the cut ones become before they travel."""
    cut: dict[torch.dtype, dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            cut.setdefault(tensor.dtype, {})[name] = tensor
    found = dict(tensors)
    for alike in cut.values():
        found |= joined(alike, dtype)
    return found


def joined(cut: Mapping[str, DTensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """All of one dtype and one mesh. Every rank has the same number of rows of a tensor, but for the last ones that have
    any: theirs have room behind them on the way."""
    mesh = next(iter(cut.values())).device_mesh
    ranks = mesh.size()
    rows = {name: -(-tensor.shape[0] // ranks) for name, tensor in cut.items()}
    sizes = [rows[name] * tensor.shape[1:].numel() for name, tensor in cut.items()]
    shards = [tensor.to_local().reshape(-1) for tensor in cut.values()]
    mine = shards[0].new_empty(sum(sizes), dtype=dtype)
    for part, own in zip(mine.split(sizes), shards, strict=True):
        # Cast on the way: each byte is read once and written once. What is behind the last row nobody reads.
        part[: own.numel()].copy_(own)
    everyone = mine
    if ranks > 1:
        everyone = mine.new_empty(ranks * mine.numel())
        ALL_GATHER(everyone, mine, group=mesh.get_group())
    parts = everyone.view(ranks, -1).split(sizes, dim=1)
    for (name, tensor), part in zip(cut.items(), parts, strict=True):
        yield name, part.reshape(ranks * rows[name], *tensor.shape[1:])[: tensor.shape[0]]
