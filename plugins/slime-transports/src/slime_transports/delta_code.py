"""Encoding of deltas: the positions and new values of a bucket's changed elements.

Elements are compared bit by bit. Positions are encoded as distances to the previous one; positions and values are stored
byte plane by byte plane, compressed by zstd. Operations over all elements run on the device that has them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, TypeAlias

import torch
import zstandard
from torch import Tensor

from slime_training.host_memory import on_host
from slime_transports.flattened_bucket import FlattenedBucket

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by the bytes of an element, to compare elements bit by bit."""
MOST_OF_ZLIB: Final = 9
THREADS: Final = 4
"""Number of threads that compress one part."""

Planes: TypeAlias = "list[tuple[Tensor, Tensor]]"
"""For each run of equal width, with N changed elements: distances (4, N) and values (width, N) as uint8 on the host."""


def runs(dtypes: Sequence[torch.dtype], ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (bytes of an element, start, end) of ranges of equal width in a bucket."""
    start = 0
    for width, run in groupby(zip(dtypes, ends, strict=True), key=lambda item: item[0].itemsize):
        end = list(run)[-1][1]
        yield width, start, end
        start = end


def compare(held: Tensor, bucket: FlattenedBucket) -> Planes:
    """The changes from `held` (bytes,), on the host, to the bucket. Updates `held`."""
    found: Planes = []
    for width, start, end in runs(bucket.dtypes, bucket.ends):
        after = bucket.data[start:end].view(BITS[width])
        before = held[start:end].view(BITS[width]).to(after.device, non_blocking=True)
        positions = (before != after).nonzero().flatten()
        steps = positions.diff(prepend=positions.new_zeros(1)).to(torch.int32)
        found.append((planes(steps), planes(after[positions])))
    held.copy_(bucket.data)
    return found


def compress(changes: Planes, *, level: int, with_zlib: bool = False) -> tuple[bytes, list[tuple[int, int]]]:
    """The delta, and the sizes of its parts. `with_zlib`: for `WeightReceiver.zlib`, whose levels end at 9."""
    compressor = zstandard.ZstdCompressor(level=level, threads=THREADS)

    def pack(part: Tensor) -> bytes:
        data = part.contiguous().numpy().data
        return zlib.compress(data, min(level, MOST_OF_ZLIB)) if with_zlib else compressor.compress(data)

    coded = [[pack(part) for part in run] for run in changes]
    return b"".join(part for run in coded for part in run), [(len(steps), len(values)) for steps, values in coded]


def decompress(content: bytes, parts: Sequence[tuple[int, int]]) -> Planes:
    """Raises ValueError for what `compress` has not written."""
    decompressor = zstandard.ZstdDecompressor()
    view, place = memoryview(content), 0
    found = []
    for sizes in parts:
        run = []
        for size in sizes:
            try:
                length = zstandard.frame_content_size(view[place : place + size])
                data = torch.empty(max(length, 0), dtype=torch.uint8)
                with decompressor.stream_reader(view[place : place + size]) as reader:
                    read = reader.readinto(data.numpy().data) if length > 0 else 0
            except zstandard.ZstdError as error:
                raise ValueError(f"not a delta: {error}") from error
            if read != length:
                raise ValueError(f"not a delta: {read} bytes where {length} should be")
            run.append(data)
            place += size
        steps, values = run
        count = len(steps) // 4
        found.append((steps.view(4, count), values.view(-1, count) if count else values.view(1, 0)))
    return found


def changed(
    planes: Planes, dtypes: Sequence[torch.dtype], ends: Sequence[int], device: torch.device
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """(bytes of an element, start, end, positions from `start` in elements, values as integers) of each run."""
    for (width, start, end), (steps, values) in zip(runs(dtypes, ends), planes, strict=True):
        # Distances are unsigned.
        distances = joined(steps, 4, device).to(torch.int64) & 0xFFFFFFFF
        yield width, start, end, distances.cumsum(0), joined(values, width, device)


def planes(numbers: Tensor) -> Tensor:
    """(N,) to (bytes of an element, N)."""
    return on_host(numbers.view(torch.uint8).view(len(numbers), numbers.element_size()).T.contiguous())


def joined(planes: Tensor, width: int, device: torch.device) -> Tensor:
    """(width, N) to (N,) of `width` bytes each."""
    return planes.to(device).T.flatten().contiguous().view(BITS[width])
