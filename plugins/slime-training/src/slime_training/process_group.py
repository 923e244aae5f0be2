"""The default process group of a trainer process, which several roles may share, and groups beside it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Final

import torch.distributed as dist

from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError
from slime_training.rendezvous import listen_with_gloo_near, on_one_address

SAVE_WAIT: Final = timedelta(days=1)
ALONE: Final = "tcp://127.0.0.1:0"
"""Where a single rank meets no one."""


def join_group(setup: TrainerSetup) -> bool:
    """Creates the default process group, or uses the one that another role of this process created. Returns whether it was
    created here. Raises ConfigError if the other group has other ranks."""
    if dist.is_initialized():
        if dist.get_world_size() != setup.world_size or dist.get_rank() != setup.rank:
            raise ConfigError(
                f"role {setup.role}: it is rank {setup.rank} of {setup.world_size}, but this process already is rank "
                f"{dist.get_rank()} of {dist.get_world_size()} for another role. Set the same ranks for both roles."
            )
        return False
    # With gloo for the host too: offloaded gradients and checkpoint plans are on the CPU.
    backend = "cpu:gloo,cuda:nccl" if setup.device == "cuda" else "gloo"
    if setup.world_size == 1:
        make_single_group(backend)
    else:
        listen_with_gloo_near(setup.rendezvous)
        method = on_one_address(setup.rendezvous)
        dist.init_process_group(backend, init_method=method, rank=setup.rank, world_size=setup.world_size)
    return True


def make_single_group(backend: str = "gloo") -> None:
    """Creates the default process group of a single rank. gloo listens for it too, here on the loopback alone."""
    listen_with_gloo_near(ALONE)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


class CheckpointGroups:
    """For collectives while checkpoints are written: each is made where it is first needed, by all ranks."""

    def __init__(self, make: Callable[[], dist.ProcessGroup | None]) -> None:
        """`make`: `group_for_saving`; None: a single rank without a process group."""
        self._make = make

    @cached_property
    def saving(self) -> dist.ProcessGroup | None:
        return self._make()

    @cached_property
    def staging(self) -> dist.ProcessGroup | None:
        """Of the thread that writes what was staged."""
        return self._make()


def group_for_saving() -> dist.ProcessGroup:
    """Creates a group of all ranks for the host; all of them call it. Ranks that have written their part of a checkpoint wait
    in it for the others, which may take hours: gloo's default timeout is 30 minutes. A rank that has died is not waited for:
    its connections close, and the launcher ends the other ranks."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=SAVE_WAIT)
    return group
