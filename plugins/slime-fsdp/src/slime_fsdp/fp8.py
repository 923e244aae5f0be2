"""Linear layers of decoder layers whose products are computed in FP8, by torchao."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from slime_core.errors import ConfigError

MULTIPLE: Final = 16
"""Of the features of a matrix, for the products of GPUs."""
LEAST_CAPABILITY: Final = (8, 9)
"""Of the first GPUs with such products: Ada and Hopper."""
ROUTERS: Final = frozenset({"gate", "router", "shared_expert_gate"})
"""Which experts a token gets hangs on small differences."""


def require_fp8(recipe: str, device: torch.device, compute_dtype: torch.dtype) -> None:
    """ConfigError where it cannot be computed. On a CPU it is emulated: the same rounding, and no speed."""
    asked = f'backend.fp8_recipe = "{recipe}"'
    if compute_dtype != torch.bfloat16:
        raise ConfigError(f'{asked}: on the CPU it needs precision = "bfloat16" too.')
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < LEAST_CAPABILITY:
        raise ConfigError(
            f"{asked}: {torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))} and no "
            "FP8, which begins with 8.9 (Ada, Hopper). Leave it out."
        )


def use_fp8(layers: Iterable[nn.Module], recipe: str, device: torch.device) -> None:
    """Replaces the linear modules in `layers`; parameters keep their names, shapes and dtypes. `recipe`: torchao's name."""
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        # Packed micro-batches have any number of tokens, and weight gradients are sums over them.
        pad_inner_dim=True,
        emulate=device.type != "cuda",
    )
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=is_computed_in_fp8)


def is_computed_in_fp8(module: nn.Module, name: str) -> bool:
    if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in ROUTERS:
        return False
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
