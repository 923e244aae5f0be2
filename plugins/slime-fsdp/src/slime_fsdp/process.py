"""The process group and the meshes of ranks: the caller that created them destroys them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime_core.contracts.setup import TrainerSetup
from slime_training.process_group import group_for_saving, join_group


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """`mesh` contains all ranks of the role, `cp_group` those that share sequences. Both None: a single rank without a process
    group."""

    mesh: DeviceMesh | None = None
    cp_group: dist.ProcessGroup | None = None
    made_group: bool = False

    @property
    def is_first(self) -> bool:
        return self.mesh is None or self.mesh.get_rank() == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group()

    def all_agree(self, flag: torch.Tensor) -> torch.Tensor:
        """A bool scalar, True if it is True on every rank."""
        if self.mesh is None or self.mesh.size() == 1:
            return flag
        votes = flag.to(torch.float32)
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        return votes > 0

    def group_for_saving(self) -> dist.ProcessGroup | None:
        return None if self.mesh is None else group_for_saving()

    def leave(self) -> None:
        if self.made_group and dist.is_initialized():
            dist.destroy_process_group()


def join(setup: TrainerSetup, *, cp_size: int, needs_mesh: bool) -> Ranks:
    """Joins the default process group, or uses the one that another backend of this process has created."""
    if setup.world_size == 1 and not needs_mesh:
        return Ranks()
    made = join_group(setup)
    mesh = init_device_mesh(setup.device, (setup.world_size,), mesh_dim_names=("shard",))
    cp_group = None
    if cp_size > 1:
        grid = init_device_mesh(setup.device, (setup.world_size // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
        cp_group = grid["cp"].get_group()
    return Ranks(mesh=mesh, cp_group=cp_group, made_group=made)
