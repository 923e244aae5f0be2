"""BlockTensors: trained tensors as a folder in float8 by block holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from slime_core.contracts.converter import TensorFormat
from slime_core.data.model_folder import read_model_config, shapes_in
from slime_core.errors import ModelError
from slime_quantize.blocks import BlockScheme

SCALE: Final = "weight_scale_inv"


class BlockTensors(TensorFormat):
    """The matrices that have scales in the folder are quantized."""

    def __init__(self, folder: Path) -> None:
        height, width = read_model_config(folder)["quantization_config"]["weight_block_size"]
        if height != width:
            raise ModelError(f"{folder}: its blocks are {height} by {width}, and only square ones are known.")
        names = shapes_in(folder)
        self._quantized = frozenset(name.removesuffix(SCALE) + "weight" for name in names if name.endswith(f".{SCALE}"))
        if not self._quantized:
            raise ModelError(
                f"{folder}: config.json declares quantized weights, but the folder has no scales ({SCALE})."
            )
        self._scheme = BlockScheme(height)

    def names(self, name: str) -> Sequence[str]:
        return (name, name.removesuffix("weight") + SCALE) if name in self._quantized else (name,)

    def converted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        pairs = self._scheme.of_all({name: tensor for name, tensor in tensors.items() if name in self._quantized})
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            made |= zip(self.names(name), pairs.get(name, (tensor,)), strict=True)
        return made
