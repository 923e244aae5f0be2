"""Drivers of the quantizing converters, which the entry points name. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.converter import ConverterDriver
from slime_core.contracts.driver import DriverConfig
from slime_quantize.config import Fp8Config, Int4Config

if TYPE_CHECKING:
    from slime_core.contracts.converter import Converter, TensorFormat


class Fp8(ConverterDriver):
    """A Hugging Face folder to float8 (e4m3) weights; activations are scaled when the engine computes them."""

    Config: ClassVar[type[DriverConfig]] = Fp8Config

    @classmethod
    def build(cls, config: Fp8Config) -> Converter:
        from slime_quantize.folder import QuantizeFolder
        from slime_quantize.schemes import fp8

        return QuantizeFolder(fp8(config), config.ignore)

    @classmethod
    def writes(cls, quantization: Mapping[str, Any]) -> bool:
        """By block alone: engines take no other weights from a trainer."""
        return quantization.get("quant_method") == "fp8" and bool(quantization.get("weight_block_size"))

    @classmethod
    def tensor_format(cls, folder: Path) -> TensorFormat:
        from slime_quantize.tensors import BlockTensors

        return BlockTensors(folder)


class Int4(ConverterDriver):
    """A Hugging Face folder to packed 4-bit integer weights, rounded to the nearest; activations stay as they are."""

    Config: ClassVar[type[DriverConfig]] = Int4Config

    @classmethod
    def build(cls, config: Int4Config) -> Converter:
        from slime_quantize.folder import QuantizeFolder
        from slime_quantize.schemes import int4

        return QuantizeFolder(int4(config), config.ignore)
