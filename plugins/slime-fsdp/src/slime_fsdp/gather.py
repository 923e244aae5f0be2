"""Gathers sharded parameters: one collective for many."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime_training.joint_gather import gather_jointly


# Otherwise each part of a tensor would go through an autograd function on the host.
@torch.no_grad()
def gathered(
    tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, *, unchanged: Collection[str] = ()
) -> dict[str, Tensor]:
    """Returns tensors that FSDP has sharded along dim 0 as whole tensors, and the others unchanged. All ranks call it, with the
    same names. `dtype`: sharded ones are cast to it before they are sent, except those that are `unchanged`."""
    cut: dict[tuple[torch.dtype, torch.dtype | None], dict[str, DTensor]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            cut.setdefault((tensor.dtype, None if name in unchanged else dtype), {})[name] = tensor
    joint = {name: tensor for (_, cast_to), alike in cut.items() for name, tensor in joined(alike, cast_to)}
    return {name: joint[name] if name in joint else tensor.detach() for name, tensor in tensors.items()}


def joined(cut: Mapping[str, DTensor], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Gathers tensors of one dtype and one mesh. Every rank has the same number of rows of a tensor, except the last ranks,
    whose rows are padded for the transfer."""
    mesh = next(iter(cut.values())).device_mesh
    ranks = mesh.size()
    rows = [-(-tensor.shape[0] // ranks) for tensor in cut.values()]
    sizes = [number * tensor.shape[1:].numel() for number, tensor in zip(rows, cut.values(), strict=True)]
    shards = [tensor.to_local().reshape(-1) for tensor in cut.values()]
    mine = shards[0].new_empty(sum(sizes), dtype=dtype)
    # Cast on the way: each byte is read once and written once. Nothing reads behind the last row.
    torch._foreach_copy_([part[: len(own)] for part, own in zip(mine.split(sizes), shards, strict=True)], shards)
    found = gather_jointly(mine, sizes, mesh.get_group())
    for (name, tensor), number, flat in zip(cut.items(), rows, found, strict=True):
        yield name, flat.view(ranks * number, *tensor.shape[1:])[: tensor.shape[0]]
