"""Scheme: how one matrix is quantised, and what the folder's config says of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Scheme(ABC):
    @abstractmethod
    def config(self, kept: Sequence[str]) -> Mapping[str, Any]:
        """`quantization_config` of config.json. `kept`: names of linear layers that are not quantised."""

    def check(self, name: str, shape_OI: Sequence[int]) -> None:
        """ModelError if a matrix of this shape has no scales."""

    @abstractmethod
    def quantized(self, weight_OI: Tensor) -> Mapping[str, Tensor]:
        """By what stands behind the layer's name. Of a matrix of bfloat16, float16 or float32 whose numbers are finite."""
