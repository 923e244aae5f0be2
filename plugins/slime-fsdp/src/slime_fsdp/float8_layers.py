"""Linear layers in float8 (torchao): e4m3, a scale for each row of an input, a weight and a gradient. The output head,
embeddings and norms stay as they are, and so do the weights that are kept and sent between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from slime_core.errors import ModelError
from slime_fsdp.stream_padding import MULTIPLE


def use_float8(layers: Sequence[nn.Module], recipe: str, *, emulate: bool) -> None:
    """Replaces the linear layers inside `layers`. They keep their parameters. `recipe`: torchao's name. `emulate`: round as
    float8 does, and compute the products in the dtype of the inputs; for the CPU, whose torch has no such products."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
                raise ModelError(
                    f"backend.fp8_recipe: {name} of a layer has {module.in_features} inputs and {module.out_features} outputs, "
                    f"and float8 requires multiples of {MULTIPLE}. Leave fp8_recipe out."
                )
        convert_to_float8_training(layer, config=config)
