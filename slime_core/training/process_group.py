"""The default process group of a trainer process, which several roles may share."""

from __future__ import annotations

import torch.distributed as dist

from slime_core.contracts.backend import TrainerSetup
from slime_core.errors import ConfigError


def join_group(setup: TrainerSetup) -> bool:
    """Makes it, or takes the one that another role of this process has made; whether it was made here. ConfigError if the
    other one is of other ranks."""
    if dist.is_initialized():
        if dist.get_world_size() != setup.world_size or dist.get_rank() != setup.rank:
            raise ConfigError(
                f"role {setup.role}: it is rank {setup.rank} of {setup.world_size}, but this process already is rank "
                f"{dist.get_rank()} of {dist.get_world_size()} for another role. Give both roles the same ranks."
            )
        return False
    # The host's collectives too: offloaded gradients and checkpoint plans are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    if setup.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(backend, init_method=setup.rendezvous, rank=setup.rank, world_size=setup.world_size)
    return True
