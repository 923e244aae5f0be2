"""The default process group of a trainer process, which several roles may share, and those made beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError

SAVE_WAIT: Final = timedelta(days=1)


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


def group_for_saving() -> dist.ProcessGroup:
    """Of all ranks, for the host; all of them call. Ranks that have written their part of a checkpoint wait in it for one
    that still writes, which may take hours: gloo would give up after 30 minutes. One that has died is not waited for:
    its connections close, and the launcher ends the others."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=SAVE_WAIT)
    return group
