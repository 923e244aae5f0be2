"""The matrices of a model's layers, on which some optimizers step in a way of their own."""

from __future__ import annotations

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from slime_fsdp.adapters import is_adapter
from slime_fsdp.packed_model import decoder_layers


def hidden_matrices(model: PreTrainedModel) -> frozenset[int]:
    """Ids of the weights of linear layers inside the layers. Not of adapters, whose two matrices are factors of one; not of
    experts in one tensor, nor of routers, which are no linear layers in transformers."""
    named = ((name, module) for layer in decoder_layers(model) for name, module in layer.named_modules())
    return frozenset(
        id(module.weight)
        for name, module in named
        if isinstance(module, nn.Linear) and not is_adapter(f".{name}.weight")
    )
