"""Computes on whole matrices that FSDP has sharded by rows: each rank gets one of them, all ranks compute at once.

Legend: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Rows that each rank holds: all the same number, except the last ranks."""
    most = -(-rows // ranks)
    return [min(max(rows - rank * most, 0), most) for rank in range(ranks)]


def map_whole(
    function: Callable[[Tensor], Tensor], shapes: Sequence[torch.Size], shards: Sequence[Tensor], mesh: DeviceMesh
) -> list[Tensor]:
    """Returns this rank's rows of `function(whole)` for each matrix. All ranks of the mesh call it; rank r computes matrix r,
    so there are at most as many matrices as ranks. `shapes`: (R, C) of the whole matrices; `shards`: this rank's rows of them,
    of one dtype, which `function` keeps."""
    ranks, me, group = mesh.size(), mesh.get_local_rank(), mesh.get_group()
    own = shapes[me] if me < len(shapes) else torch.Size((0, 0))
    received = [number * own[1] for number in rows_of_ranks(own[0], ranks)]
    sizes = [shard.numel() for shard in shards]
    sent = sizes + [0] * (ranks - len(shards))
    # Shards that are kept on the host travel between the devices of the mesh.
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    rows = torch.cat([shard.reshape(-1) for shard in shards]).to(device)
    whole = rows.new_empty(own.numel())
    dist.all_to_all_single(whole, rows, received, sent, group=group)
    if whole.numel():
        whole = function(whole.view(own)).reshape(-1)
    dist.all_to_all_single(rows, whole, sent, received, group=group)
    found = torch.split(rows.to(shards[0].device), sizes)
    return [flat.view(-1, shape[1]) for flat, shape in zip(found, shapes, strict=True)]
