"""LowRank: an adapter's matrices; LowRankLayers: linear layers that add s B A x of the adapter in use to what they compute.

Legend: O features out, I features in, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from slime_training.adapters.shape import AdapterShape


class Matrices(NamedTuple):
    a_RI: Tensor
    b_OR: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LowRank:
    """Each pair of matrices by the name of its layer in the model."""

    scale: float
    layers: Mapping[str, Matrices]

    @classmethod
    def fresh(cls, layers: Mapping[str, nn.Linear], shape: AdapterShape, *, seed: int) -> LowRank:
        """float32 on the CPU: A uniform within 1 / sqrt(I), as peft draws it, and B = 0. What is drawn for a layer depends on
        the seed and its name alone."""
        found = {}
        for name, layer in layers.items():
            draw = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
            bound = 1 / math.sqrt(layer.in_features)
            a_RI = torch.empty(shape.rank, layer.in_features).uniform_(-bound, bound, generator=draw)
            found[name] = Matrices(a_RI, torch.zeros(layer.out_features, shape.rank))
        return cls(scale=shape.scale, layers=found)

    def map(self, each: Callable[[Tensor], Tensor]) -> LowRank:
        layers = {name: Matrices(each(pair.a_RI), each(pair.b_OR)) for name, pair in self.layers.items()}
        return LowRank(scale=self.scale, layers=layers)

    def tensors(self) -> dict[str, Tensor]:
        """By name, in the order of layers: `model.layers.0.mlp.up_proj.lora_A.weight`."""
        return {
            f"{name}.lora_{which}.weight": matrix
            for name, pair in self.layers.items()
            for which, matrix in zip("AB", pair, strict=True)
        }

    def reduced(self, name: str, x: Tensor) -> Tensor | None:
        """s A x (..., R) of the layer; None: it has no matrices."""
        pair = self.layers.get(name)
        return None if pair is None else nn.functional.linear(x, pair.a_RI.to(x.dtype)) * self.scale


class LowRankLayers:
    """The layers of one model, for any number of adapters. Without an adapter in use they compute what they did before, to the
    bit. Layers are named as in `model`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooked: set[str] = set()
        self.used: LowRank | None = None

    def prepare(self, adapter: LowRank) -> None:
        """Before its first use."""
        for name in adapter.layers.keys() - self._hooked:
            self._model.get_submodule(name).register_forward_hook(self._hook_of(name))
            self._hooked.add(name)

    @contextmanager
    def using(self, adapter: LowRank | None) -> Iterator[None]:
        """Within, every forward of the model is the adapter's; None: the model's alone."""
        before, self.used = self.used, adapter
        try:
            yield
        finally:
            self.used = before

    def _hook_of(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def added(module: nn.Module, inputs: tuple[Any, ...], y: Tensor) -> Tensor | None:
            used = self.used
            if used is None or (pair := used.layers.get(name)) is None:
                return None
            (x,) = inputs
            low = nn.functional.linear(x, pair.a_RI.to(x.dtype))
            return y + nn.functional.linear(low, pair.b_OR.to(x.dtype)) * used.scale

        return added
