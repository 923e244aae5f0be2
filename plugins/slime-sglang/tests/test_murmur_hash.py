"""The hash that seeds SGLang's samplers, against MurmurHash3 in whole numbers."""

import torch

from slime_sglang.server.murmur_hash import murmur_hash32


def murmur3_32(words):
    """Appleby's MurmurHash3_x86_32 with seed 0, over four-byte blocks."""
    mask, state = 0xFFFFFFFF, 0
    for word in words:
        block = word * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) & mask
        state ^= block * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= 4 * len(words)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def test_the_oracle():
    # Public test vectors: "test" and "\\0\\0\\0\\0", seed 0.
    assert murmur3_32([int.from_bytes(b"test", "little")]) == 0xBA6BD213
    assert murmur3_32([0]) == 0x2362F9DE


def test_hash():
    seeds = [0, 1, 2**31, 2**40 + 3, 2**64 - 1]
    positions = [0, 7, 2**31 - 1, 12, 5]
    columns = [0, 1, 2, 151_935]
    got = murmur_hash32(
        torch.tensor(seeds, dtype=torch.uint64), torch.tensor(positions, dtype=torch.int32), torch.tensor(columns)
    )
    assert got.dtype == torch.uint32
    expected = [
        [murmur3_32([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert got.to(torch.int64).tolist() == expected
