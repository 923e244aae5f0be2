"""Drivers of the entry points in `slime.converters`: formats. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slime_core.contracts.converter import ConverterDriver
from slime_core.contracts.driver import DriverConfig

if TYPE_CHECKING:
    from slime_core.contracts.converter import Converter


class TorchDist(ConverterDriver):
    """A Hugging Face folder to Megatron's torch_dist, which any layout can load."""

    @classmethod
    def build(cls, config: Any) -> Converter:
        from slime_megatron.conversion import ToTorchDist

        return ToTorchDist()


class HfConfig(DriverConfig):
    hf_checkpoint: Path | None = None
    """Hugging Face folder with config and tokenizer of the model. Not required for the result of `--to torch_dist`."""


class Hf(ConverterDriver):
    """Megatron's torch_dist, or a training checkpoint of backend megatron, to a Hugging Face folder."""

    Config: ClassVar[type[DriverConfig]] = HfConfig

    @classmethod
    def build(cls, config: Any) -> Converter:
        from slime_megatron.conversion import FromTorchDist

        return FromTorchDist(config.hf_checkpoint)
