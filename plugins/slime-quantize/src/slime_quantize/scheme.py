"""Scheme: how one matrix is quantized, and its entry in the folder's config."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Scheme(ABC):
    @abstractmethod
    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        """`quantization_config` of config.json. `kept`: names of linear layers that are not quantized."""

    def check(self, name: str, shape_OI: Sequence[int]) -> None:
        """ModelError if a matrix of this shape has no scales."""

    @abstractmethod
    def quantized(self, weight_OI: Tensor) -> Mapping[str, Tensor]:
        """Tensors by their suffix behind the layer's name. `weight_OI`: bfloat16, float16 or float32, all finite."""
