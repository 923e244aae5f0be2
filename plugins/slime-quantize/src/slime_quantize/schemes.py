"""Schemes: how one matrix is quantised, by compressed-tensors, and what the folder's config says of it.

Legend: O output channels, I inputs, B block size, G group size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from slime_core.errors import ModelError
from slime_quantize.plugin import Fp8Config, Int4Config


@dataclass(frozen=True, kw_only=True)
class Scheme(ABC):
    weights: QuantizationArgs
    format: str
    """A name of compressed-tensors'."""

    @abstractmethod
    def ranges(self, name: str, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest of the numbers that share a scale, in the scales' shape."""

    @abstractmethod
    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        """`quantization_config` of config.json. `kept`: names of linear layers that are not quantised."""

    def check(self, name: str, shape_OI: Sequence[int]) -> None:
        """ModelError if a matrix of this shape has no scales."""

    def named(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """As the engine looks for them."""
        return parts

    def quantized(self, name: str, weight_OI: Tensor) -> dict[str, Tensor]:
        """By what stands behind the layer's name."""
        low, high = self.ranges(name, weight_OI.float())
        scale, _ = calculate_qparams(low, high, self.weights)
        compressor: Any = BaseCompressor.get_value_from_registry(self.format)
        scheme = QuantizationScheme(targets=["Linear"], weights=self.weights)
        made = compressor.compress({"weight": weight_OI.float(), "weight_scale": scale}, scheme)
        return dict(self.named({key: tensor.contiguous() for key, tensor in made.items()}))


@dataclass(frozen=True, kw_only=True)
class BlockScheme(Scheme):
    """DeepSeek's: a float32 scale for each block, called `weight_scale_inv`."""

    size: int

    def ranges(self, name: str, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        outputs, inputs = weight_OI.shape
        padding = (0, -inputs % self.size, 0, -outputs % self.size)
        blocks = torch.nn.functional.pad(weight_OI, padding).unflatten(0, (-1, self.size)).unflatten(2, (-1, self.size))
        return blocks.amin((1, 3)), blocks.amax((1, 3))

    def named(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"]}

    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [self.size, self.size],
            "modules_to_not_convert": list(kept),
        }


@dataclass(frozen=True, kw_only=True)
class CompressedScheme(Scheme):
    """In compressed-tensors' own layout."""

    activations: QuantizationArgs | None = None

    def check(self, name: str, shape_OI: Sequence[int]) -> None:
        size = self.weights.group_size
        if size and shape_OI[1] % size:
            raise ModelError(
                f"{name}: its {shape_OI[1]} inputs are no multiple of group_size = {size}. Say another --group-size, or "
                "leave such layers out with --ignore."
            )

    def ranges(self, name: str, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        if self.weights.strategy == "tensor":
            return weight_OI.amin().reshape(1), weight_OI.amax().reshape(1)
        if self.weights.strategy == "channel":
            return weight_OI.amin(1, keepdim=True), weight_OI.amax(1, keepdim=True)
        size = self.weights.group_size
        assert size is not None
        groups = weight_OI.unflatten(1, (-1, size))
        return groups.amin(2), groups.amax(2)

    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        scheme = QuantizationScheme(targets=["Linear"], weights=self.weights, input_activations=self.activations)
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme.model_dump(mode="json", exclude_none=True)},
            "ignore": list(kept),
            "kv_cache_scheme": None,
        }


def fp8(config: Fp8Config) -> Scheme:
    if config.strategy == "block":
        size = config.block_size
        weights = QuantizationArgs(
            num_bits=8, type="float", strategy="block", block_structure=[size, size], symmetric=True
        )
        return BlockScheme(weights=weights, format="float-quantized", size=size)
    return CompressedScheme(
        weights=QuantizationArgs(num_bits=8, type="float", strategy=config.strategy, symmetric=True),
        # A scale for each token goes with one for each channel.
        activations=QuantizationArgs(
            num_bits=8,
            type="float",
            strategy="token" if config.strategy == "channel" else "tensor",
            symmetric=True,
            dynamic=True,
        ),
        format="float-quantized",
    )


def int4(config: Int4Config) -> Scheme:
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=config.group_size, symmetric=True)
    return CompressedScheme(weights=weights, format="pack-quantized")
