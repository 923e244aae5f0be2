"""LoRA adapters of a model (Hu et al. 2021, arXiv 2106.09685): y = W x + s B A x, of which A and B alone are trained.

What is here knows the adapters by their names only; `adapter_layers` puts them into a model, with peft.

Legend: O features out, I features in, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slime_core.errors import ModelError
from slime_training.rounded_adamw import local

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""peft's name of the only adapter of a model."""
ADAPTER_WEIGHT = re.compile(rf"\.lora_[AB]\.{ADAPTER}\.weight$")
VALUE_HEAD = re.compile(r"^score\.")
BASE_LAYER = ".base_layer."
FILE_PREFIX = "base_model.model."


@dataclass(frozen=True, kw_only=True)
class Adapters:
    config: LoraConfig
    scales: Mapping[str, float]
    """Scale s of each adapted layer, by the layer's name."""

    def merge(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns W + s B A under the names of the base model, (O, I) float32; weights without adapter are unchanged.
        `weights`: whole tensors under the names of this model, of complete layers."""
        merged: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if is_adapter(name):
                continue
            layer, inside, leaf = name.partition(BASE_LAYER)
            if inside and leaf == "weight":
                a_RI, b_OR = (weights[f"{layer}.lora_{which}.{ADAPTER}.weight"] for which in "AB")
                merged[base_name(name)] = tensor.float() + (b_OR.float() @ a_RI.float()) * self.scales[layer]
            else:
                merged[base_name(name)] = tensor
        return merged


def config_file_of(adapters: Adapters | None) -> dict[str, Any]:
    """Content of peft's adapter_config.json; ModelError without adapters."""
    if adapters is None:
        raise ModelError("backend fsdp trains no adapters. Set backend.lora_rank.")
    content = adapters.config.to_dict() | {"inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}


def is_adapter(name: str) -> bool:
    return ADAPTER_WEIGHT.search(name) is not None


def is_trained_with_adapters(name: str) -> bool:
    """A new value head is trained as a whole, since it has no base weights."""
    return is_adapter(name) or VALUE_HEAD.match(name) is not None


def base_name(name: str) -> str:
    """The weight's name in the model without adapters."""
    return name.replace(BASE_LAYER, ".")


def file_name(name: str) -> str:
    """The trained weight's name in peft's adapter_model.safetensors."""
    return FILE_PREFIX + name.replace(f".{ADAPTER}.", ".")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def values_without_effect(model: nn.Module) -> dict[str, Tensor]:
    """Adapters that do not change the base model: B = 0."""
    return {name: torch.zeros_like(parameter.detach()) for name, parameter in trained_parameters(model).items()}


def copy_trained(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies the trained weights into `values`."""
    for name, parameter in trained_parameters(model).items():
        local(values[name]).copy_(local(parameter.detach()))


@contextmanager
def replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Runs the model with other adapters. Under FSDP no weights may be gathered on entry or exit."""
    mine = {name: local(parameter.detach()) for name, parameter in trained_parameters(model).items()}
    kept = {name: tensor.clone() for name, tensor in mine.items()}
    for name, tensor in mine.items():
        tensor.copy_(local(values[name]))
    try:
        yield
    finally:
        for name, tensor in mine.items():
            tensor.copy_(kept[name])
