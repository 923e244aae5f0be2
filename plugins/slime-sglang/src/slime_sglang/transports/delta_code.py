"""The code of deltas: which elements of a bucket have changed, and to what.

Elements are compared bit by bit. Positions are coded as distances from one to the next, both they and the values byte
plane by byte plane, compressed by zstd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from slime_sglang.transports.flat import FlatBucket

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, a dtype whose comparison is one of bits."""


def runs(dtypes: Sequence[torch.dtype], ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(bytes of an element, start, end) of stretches of equal width in a bucket."""
    start = 0
    for width, run in groupby(zip(dtypes, ends, strict=True), key=lambda item: item[0].itemsize):
        end = list(run)[-1][1]
        yield width, start, end
        start = end


def encode(held: Tensor, bucket: FlatBucket, *, level: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The delta from `held` (bytes,) on the host to the bucket, and the sizes of its parts. Brings `held` up to date."""
    compressor = zstandard.ZstdCompressor(level=level)
    content = bytearray()
    parts = []
    for width, start, end in runs(bucket.dtypes, bucket.ends):
        before = held[start:end].view(BITS[width])
        after = bucket.data[start:end].view(BITS[width])
        positions = (before.to(after.device) != after).nonzero().flatten()
        values = after[positions].cpu()
        positions = positions.cpu()
        before[positions] = values
        steps = np.diff(positions.numpy(), prepend=0).astype("<u4")
        coded = [compressor.compress(planes(steps)), compressor.compress(planes(values.numpy()))]
        parts.append((len(coded[0]), len(coded[1])))
        content += b"".join(coded)
    return bytes(content), parts


def decode(
    content: bytes, parts: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype], ends: Sequence[int]
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """(bytes of an element, start, end, positions from `start` in elements, values as integers) of each run. Raises
    ValueError for what `encode` has not written."""
    decompressor = zstandard.ZstdDecompressor()
    place = 0
    for (width, start, end), (steps_size, values_size) in zip(runs(dtypes, ends), parts, strict=True):
        try:
            steps = decompressor.decompress(content[place : place + steps_size])
            place += steps_size
            values = decompressor.decompress(content[place : place + values_size])
            place += values_size
        except zstandard.ZstdError as error:
            raise ValueError(f"not a delta: {error}") from error
        positions = np.cumsum(joined(steps, 4).view("<u4"), dtype=np.int64)
        found = joined(values, width).view("u1" if width == 1 else f"<i{width}")
        yield width, start, end, torch.from_numpy(positions), torch.from_numpy(found)


def planes(numbers: npt.NDArray[np.generic]) -> bytes:
    return numbers.view(np.uint8).reshape(len(numbers), -1).T.tobytes() if len(numbers) else b""


def joined(content: bytes, width: int) -> npt.NDArray[np.uint8]:
    """(elements * width,)."""
    return np.frombuffer(content, np.uint8).reshape(width, -1).T.flatten()
