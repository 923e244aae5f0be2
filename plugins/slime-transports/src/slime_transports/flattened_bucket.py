"""FlattenedBucket: exported tensors one after the other in one buffer on their device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import torch
import xxhash
from torch import Tensor

from slime_training.host_memory import HostMemory, on_host

HASHERS: Final = 4
STACKED: Final = ("q_a_proj", "kv_a_proj_with_mqa")
"""Projections of latent attention that SGLang stacks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlattenedBucket:
    """Whole tensors, wider dtypes first: every tensor begins at a multiple of its element's size, with no gaps."""

    index: int
    last: bool
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    data: Tensor
    """(bytes,) uint8."""

    @property
    def ends(self) -> list[int]:
        """End of each tensor, in bytes."""
        ends: list[int] = []
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            ends.append((ends[-1] if ends else 0) + dtype.itemsize * torch.Size(shape).numel())
        return ends

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of `data`."""
        start = 0
        for name, dtype, shape, end in zip(self.names, self.dtypes, self.shapes, self.ends, strict=True):
            yield name, self.data[start:end].view(dtype).view(shape)
            start = end

    def on_host(self, memory: HostMemory) -> FlattenedBucket:
        """The bucket copied to `memory`, which must not be in use any more; unchanged if it is on the host."""
        if not self.data.is_cuda:
            return self
        return replace(self, data=memory.room(self.data.nbytes).copy_(self.data))


def flat_buckets(layers: Iterable[Mapping[str, Tensor] | None], bucket_bytes: int) -> Iterator[FlattenedBucket | None]:
    """Packs tensors into buckets; yields None for each layer that another rank has. Tensors that must stay together and exceed
    `bucket_bytes` get a bucket of their own."""
    pending: list[tuple[str, Tensor]] = []
    size = index = 0
    for tensors in inseparable(layers):
        if tensors is None:
            yield None
            continue
        nbytes = sum(tensor.nbytes for _, tensor in tensors)
        if pending and size + nbytes > bucket_bytes:
            yield flatten(pending, index=index, last=False)
            pending, size, index = [], 0, index + 1
        pending += tensors
        size += nbytes
    if pending:
        yield flatten(pending, index=index, last=True)


def inseparable(layers: Iterable[Mapping[str, Tensor] | None]) -> Iterator[list[tuple[str, Tensor]] | None]:
    """Yields groups of tensors that one request must contain together. A tensor waits for its partner, if necessary to the
    end, because some models have only one of them."""
    waiting: dict[str, tuple[str, Tensor]] = {}
    for layer in layers:
        if layer is None:
            yield None
            continue
        for name, tensor in layer.items():
            item = name, tensor.detach()
            partner = partner_of(name)
            if partner is None:
                yield [item]
            elif partner in waiting:
                yield [waiting.pop(partner), item]
            else:
                waiting[name] = item
    for item in waiting.values():
        yield [item]


def partner_of(name: str) -> str | None:
    """The tensor without which SGLang forgets this one: it stacks the two, and keeps neither for its next update."""
    for own, other in (STACKED, STACKED[::-1]):
        if f".{own}." in name:
            return name.replace(f".{own}.", f".{other}.")
    return None


def flatten(tensors: list[tuple[str, Tensor]], *, index: int, last: bool) -> FlattenedBucket:
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    flat = [tensor.reshape(-1) for _, tensor in ordered]
    if any(part.dtype != flat[0].dtype for part in flat):
        flat = [part.view(torch.uint8) for part in flat]
    return FlattenedBucket(
        index=index,
        last=last,
        names=tuple(name for name, _ in ordered),
        dtypes=tuple(tensor.dtype for _, tensor in ordered),
        shapes=tuple(tuple(tensor.shape) for _, tensor in ordered),
        data=torch.cat(flat).view(torch.uint8),
    )


def checksum(data: Tensor) -> str:
    """xxh3-64 of the bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(bytes_of(data))


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """The checksum of each tensor. Hashes several at a time, since hashing takes longer than copying."""
    if any(tensor.is_cuda for tensor in tensors):
        # Other threads have streams of their own.
        torch.cuda.current_stream().synchronize()
    with ThreadPoolExecutor(HASHERS) as hashers:
        return list(hashers.map(checksum, tensors))


def bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = on_host(tensor.detach().contiguous()).view(-1).view(torch.uint8).numpy().data
    return data
