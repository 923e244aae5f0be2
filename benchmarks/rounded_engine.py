"""A plugin file: engine `rounded`, the engine `local` with the weights of its linear layers rounded to fewer bits.

It samples, and returns log-probs, from a model that differs a little from the trained one, like engines with float8 or
integer weights. A row of a matrix has one scale, so that its largest weight is the type's largest number. Embeddings,
norms, the output head and activations are not rounded.

    slime run run.toml --plugin benchmarks/rounded_engine.py --engine rounded --engine.weights float8_e4m3fn
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
import xxhash

from slime_core.plugin import driver
from slime_core.types.weights import Bucket
from slime_local.config import LocalConfig
from slime_local.engine import LocalEngine
from slime_local.plugin import Local

ROUNDED = "_proj.weight"
"""Suffix of the names of linear layers in decoder layers."""


class RoundedConfig(LocalConfig):
    weights: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"
    """Dtype to which the weights of linear layers are rounded."""


class RoundedEngine(LocalEngine):
    def __init__(self, config: RoundedConfig) -> None:
        super().__init__(config)
        self._dtype: torch.dtype = getattr(torch, config.weights)

    async def load_bucket(self, bucket: Bucket) -> None:
        await super().load_bucket(rounded(bucket, self._dtype))


def rounded(bucket: Bucket, dtype: torch.dtype) -> Bucket:
    """The same tensors in the same types, those of linear layers with the values that `dtype` can hold."""
    data = bucket.data.copy()
    start = 0
    for name, held, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind: torch.dtype = getattr(torch, held)
        end = start + int(np.prod(shape)) * kind.itemsize
        if name.endswith(ROUNDED):
            weight = torch.from_numpy(data[start:end].copy()).view(kind).reshape(shape).float()
            scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max
            value = ((weight / scale).to(dtype).float() * scale).to(kind)
            data[start:end] = value.contiguous().view(-1).view(torch.uint8).numpy()
        start = end
    return replace(bucket, data=data, checksum=xxhash.xxh3_64_hexdigest(data.data))


@driver("slime.engines", "rounded")
class Rounded(Local):
    """The engine `local` with rounded weights."""

    Config = RoundedConfig

    @classmethod
    def build(cls, config: RoundedConfig) -> RoundedEngine:
        return RoundedEngine(config)
