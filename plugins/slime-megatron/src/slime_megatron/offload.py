"""Megatron's optimiser on the host (`optimizer_cpu_offload`), and what it takes to resume one.

Its HybridDeviceOptimizer keeps moments and a copy of the main weights on the host, and steps there. In Megatron-core 0.16 a
state is loaded into it only where it holds the main weights itself (`use_precision_aware_optimizer`, which wants Transformer
Engine). Over main weights of the distributed optimiser it is a plain AdamW of copies: so it is told, and copies are brought
up to date here after a load. Only with everything offloaded: it tells its two kinds of optimisers apart by class, and both
are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from slime_core.errors import ConfigError


def require_offload(fields: dict[str, Any], device: torch.device) -> None:
    """ConfigError unless this optimiser can be trained with and resumed."""
    asked = "backend.optimizer_cpu_offload = true"
    if device.type != "cuda":
        raise ConfigError(f"{asked}: everything is on the host here. Leave it out.")
    if not fields["use_distributed_optimizer"] or fields["optimizer"] != "adam":
        raise ConfigError(f"{asked}: only with use_distributed_optimizer = true and train.optimizer = adam.")
    if fields.get("optimizer_offload_fraction", 1.0) != 1.0 or fields.get("use_precision_aware_optimizer"):
        raise ConfigError(
            f"{asked}: all of it is offloaded, and main weights stay on the GPU; leave optimizer_offload_fraction and "
            "use_precision_aware_optimizer out."
        )


def as_plain_adamw(part: Any) -> None:
    """Of a part of the optimiser that has been made: main weights are float32 already."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer.param_update_in_fp32 = False


@torch.no_grad()
def fill_offloaded(optimizer: HybridDeviceOptimizer) -> None:
    """As the first step does."""
    for on_host in optimizer.sub_optimizers:
        for parameter in (parameter for group in on_host.param_groups for parameter in group["params"]):
            state = on_host.state[parameter]
            if not state:
                state["step"] = torch.ones((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
    optimizer._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def refresh_copies(optimizer: HybridDeviceOptimizer) -> None:
    """The host's weights from the main ones, after these were loaded."""
    for main, copy in optimizer.gpu_params_map_cpu_copy.items():
        copy.copy_(main)
