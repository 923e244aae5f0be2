"""MurmurHash3 (Appleby 2011), 32 bit, of (seed, position, column): the noise of SGLang's samplers.

Legend: N rows, V columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Returns the hashes (N, V) uint32 of `seed` (N,) uint64, `positions` (N,) and `columns` (V,) integers. The hashed blocks
    of four bytes are the seed's low and high half, the position, and the column."""
    # int64 wraps like uint64, and only low halves are kept.
    low = seed.view(torch.int64) & MASK
    high = (seed.view(torch.int64) >> 32) & MASK
    state = torch.zeros_like(low)
    for block in (low, high, positions.to(torch.int64) & MASK):
        state = mix(state, block)
    state = mix(state[:, None], columns.to(torch.int64)[None, :] & MASK)
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & MASK
    return (state ^ (state >> 16)).to(torch.uint32)


def mix(state: Tensor, block: Tensor) -> Tensor:
    block = rotated((block * 0xCC9E2D51) & MASK, 15)
    state = state ^ ((block * 0x1B873593) & MASK)
    return (rotated(state, 13) * 5 + 0xE6546B64) & MASK


def rotated(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & MASK
