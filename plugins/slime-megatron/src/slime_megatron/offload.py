"""Megatron's optimizer on the host (`optimizer_cpu_offload`), and how it is resumed.

Its HybridDeviceOptimizer keeps moments and a copy of the main weights on the host, and steps there. In Megatron-core 0.16 a
state is loaded into it only where it holds the main weights itself (`use_precision_aware_optimizer`, which requires Transformer
Engine). Over main weights of the distributed optimizer it is a plain AdamW of copies. It is configured so here, and the copies
are refreshed after a load. This requires that everything is offloaded: it distinguishes its two kinds of optimizers by class,
and both classes are torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from slime_core.errors import ConfigError


def require_offload(fields: dict[str, Any], device: torch.device) -> None:
    """Raises ConfigError unless this optimizer can be trained with and resumed."""
    asked = "backend.optimizer_cpu_offload = true"
    if device.type != "cuda":
        raise ConfigError(f"{asked}: without GPUs everything is on the host already. Leave it out.")
    if not fields["use_distributed_optimizer"] or fields["optimizer"] != "adam":
        raise ConfigError(f"{asked}: requires use_distributed_optimizer = true and train.optimizer = adam.")
    if fields.get("optimizer_offload_fraction", 1.0) != 1.0 or fields.get("use_precision_aware_optimizer"):
        raise ConfigError(
            f"{asked}: all of it is offloaded, and main weights stay on the GPU. Leave optimizer_offload_fraction and "
            "use_precision_aware_optimizer out."
        )


def as_plain_adamw(part: Any) -> None:
    """Converts a part of the optimizer to a plain AdamW; its main weights are float32 already."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        part.optimizer.param_update_in_fp32 = False


@torch.no_grad()
def fill_offloaded(optimizer: HybridDeviceOptimizer) -> None:
    """Creates the state, in the same way as the first step."""
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
    """Copies the loaded main weights to the host's copies."""
    for main, copy in optimizer.gpu_params_map_cpu_copy.items():
        copy.copy_(main)
