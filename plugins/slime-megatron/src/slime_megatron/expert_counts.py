"""Routers with a bias that follows the number of tokens of each expert. Megatron-core 0.16.1 multiplies the count by a mask of
padding (N,) where it requires one that fits the map of (N, experts), and updates biases when gradients are reduced, before they
are checked to be finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


def count_without_padding(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.enable_expert_bias:
            module._apply_expert_bias = functools.partial(with_column, module._apply_expert_bias)


def with_column(count: Callable[..., None], routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    count(routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])


def biases_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the biases, by their names in the whole model."""
    return {name: tensor.clone() for name, tensor in tensors.items() if name.endswith("expert_bias")}


def forget_counts(model: nn.Module) -> None:
    """Zeroes what a step that is interrupted has counted; a step that ends does it itself."""
    for module in model.modules():
        if isinstance(module, TopKRouter) and module.enable_expert_bias:
            module.local_tokens_per_expert.zero_()
