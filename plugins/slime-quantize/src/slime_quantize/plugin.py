"""What the entry points name: formats of quantised weights. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from slime_core.contracts.converter import ConverterDriver
from slime_core.contracts.driver import DriverConfig

if TYPE_CHECKING:
    from slime_core.contracts.converter import Converter, TensorFormat

KEPT = (r"^lm_head$", r"(^|\.)embed_tokens$", r"\.gate$", r"shared_expert_gate$", r"\.eh_proj$", r"shared_head")
"""Head, embedding, routers and what belongs to multi-token prediction's own input and head."""


class QuantizeConfig(DriverConfig):
    ignore: tuple[str, ...] = KEPT
    """Regular expressions: linear layers whose name has a match keep their weights as they are."""


class Fp8Config(QuantizeConfig):
    strategy: Literal["block", "channel", "tensor"] = "block"
    """What shares a scale: a block of `block_size` squared (DeepSeek's layout), an output channel, or the whole matrix."""
    block_size: int = Field(128, gt=0)
    """Of the strategy `block`."""


class Int4Config(QuantizeConfig):
    group_size: int = Field(128, gt=0)
    """Neighbouring inputs of one output channel that share a scale."""


class Fp8(ConverterDriver):
    """A Hugging Face folder to float8 (e4m3) weights; activations are scaled when the engine computes them."""

    Config: ClassVar[type[DriverConfig]] = Fp8Config

    @classmethod
    def build(cls, config: Any) -> Converter:
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
    def build(cls, config: Any) -> Converter:
        from slime_quantize.folder import QuantizeFolder
        from slime_quantize.schemes import int4

        return QuantizeFolder(int4(config), config.ignore)
