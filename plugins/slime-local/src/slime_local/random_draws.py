"""Random numbers that depend on a seed and a position only: SplitMix64 (Steele, Lea, Flood 2014) as a counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_MASK: Final = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch has no uint64 arithmetic; int64 wraps alike, only its right shift has to be made a logical one.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def stream_keys(seeds: Sequence[int]) -> Tensor:
    """One key per seed, (N,) int64, mixed once so that neighbouring seeds give unrelated streams."""
    wrapped = np.array([seed & _MASK for seed in seeds], dtype=np.uint64).view(np.int64)
    return _mix(torch.from_numpy(wrapped) + _signed(_GOLDEN))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """(N,) float64 in [0, 1) with 52 random bits: output `positions[i]` of the generator with state `keys[i]`."""
    mixed = _mix(keys + (positions + 1) * _signed(_GOLDEN))
    return _shift_right(mixed, 12).double() * 2.0**-52
