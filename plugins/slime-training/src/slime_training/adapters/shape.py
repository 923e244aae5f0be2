"""AdapterShape: which linear layers of a model an adapter has matrices for, and their rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import ConfigError, ModelError

DEFAULT_ALPHA: Final = 32.0
ATTENTION: Final = re.compile(r"attn|attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    rank: int
    alpha: float = DEFAULT_ALPHA
    attention: bool = True
    """Linear layers of attention blocks."""
    mlp: bool = True
    """All other linear layers of the decoder's layers."""
    unembedding: bool = True
    """The output layer."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank = {self.rank}: an adapter needs at least 1.")
        if not self.alpha > 0:
            raise ConfigError(f"alpha = {self.alpha}: must be above 0.")
        if not (self.attention or self.mlp or self.unembedding):
            raise ConfigError("attention, mlp and unembedding are all False: the adapter would have no weights.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def adapted_layers(model: PreTrainedModel, shape: AdapterShape) -> dict[str, nn.Linear]:
    """By their names in the model. ModelError if a part that `shape` names has no linear layers."""
    found: dict[str, nn.Linear] = {}
    if shape.attention or shape.mlp:
        of_attention, others = decoder_layers(model)
        for is_asked, part, layers in (("attention", shape.attention, of_attention), ("mlp", shape.mlp, others)):
            if part and not layers:
                raise ModelError(
                    f"{is_asked} = True: {type(model).__name__} has no linear layers there (experts in one tensor are none). "
                    f"Pass {is_asked}=False."
                )
            found |= layers if part else {}
    if shape.unembedding:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                f"unembedding = True: {type(model).__name__} has no linear output layer. Pass unembedding=False."
            )
        found[name_of(model, head)] = head
    return found


def decoder_layers(model: PreTrainedModel) -> tuple[dict[str, nn.Linear], dict[str, nn.Linear]]:
    """The linear layers of the language model's decoder layers, by name: of attention blocks, and the others."""
    of_attention: dict[str, nn.Linear] = {}
    others: dict[str, nn.Linear] = {}
    prefix = name_of(model, model.get_decoder())
    for outer, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer) or not outer.startswith(prefix):
            continue
        for inner, module in layer.named_modules():
            if type(module) is nn.Linear:
                part = of_attention if ATTENTION.search(inner) else others
                part[f"{outer}.{inner}"] = module
    return of_attention, others


def name_of(model: nn.Module, module: nn.Module) -> str:
    names: dict[int, str] = {id(found): name for name, found in model.named_modules()}
    return names[id(module)]
