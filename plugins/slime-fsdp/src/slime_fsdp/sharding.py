"""Sharding: how a role's ranks hold a model, and its compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from slime_fsdp.config import FsdpConfig


@dataclass(frozen=True, kw_only=True)
class Sharding:
    world_size: int
    compute: torch.dtype
    sharded: bool
    """Sharded by FSDP, also on one rank: weights that are computed in another dtype than they are kept in are gathered
    first."""
    offloaded: bool

    @classmethod
    def of(cls, config: FsdpConfig, device: str, world_size: int) -> Self:
        on_gpu = device == "cuda"
        half = on_gpu if config.precision == "auto" else config.precision == "bfloat16"
        offloaded = config.fsdp_cpu_offload and on_gpu
        return cls(
            world_size=world_size,
            compute=torch.bfloat16 if half else torch.float32,
            sharded=world_size > 1 or offloaded or half,
            offloaded=offloaded,
        )
