"""The schemes of `slime convert`; all but float8 by block are computed by compressed-tensors, in its own layout.

Legend: O output channels, I inputs, G group size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor

from slime_core.errors import ModelError
from slime_quantize.blocks import BlockScheme
from slime_quantize.config import Fp8Config, Int4Config
from slime_quantize.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class CompressedScheme(Scheme):
    weights: QuantizationArgs
    format: str
    """A name of compressed-tensors'."""
    activations: QuantizationArgs | None = None

    def check(self, name: str, shape_OI: Sequence[int]) -> None:
        size = self.weights.group_size
        if size and shape_OI[1] % size:
            raise ModelError(
                f"{name}: its {shape_OI[1]} inputs are no multiple of group_size = {size}. Pass another --group-size, or "
                "leave such layers out with --ignore."
            )

    def quantized(self, weight_OI: Tensor) -> Mapping[str, Tensor]:
        scale, _ = calculate_qparams(*self.ranges(weight_OI.float()), self.weights)
        compressor: Any = BaseCompressor.get_value_from_registry(self.format)
        scheme = QuantizationScheme(targets=["Linear"], weights=self.weights)
        made = compressor.compress({"weight": weight_OI.float(), "weight_scale": scale}, scheme)
        return {key: tensor.contiguous() for key, tensor in made.items()}

    def ranges(self, weight_OI: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest of the numbers that share a scale, in the scales' shape."""
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
        return BlockScheme(config.block_size)
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
