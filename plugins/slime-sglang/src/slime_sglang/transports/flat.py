"""FlatBucket: exported tensors one after the other in one buffer on their device, as SGLang takes them."""

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
"""Of latent attention."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatBucket:
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
        """Where each tensor ends, in bytes."""
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

    def on_host(self, memory: HostMemory) -> FlatBucket:
        """In `memory`, which nobody else reads any more; or as it is."""
        if not self.data.is_cuda:
            return self
        return replace(self, data=memory.room(self.data.nbytes).copy_(self.data))


def flat_buckets(layers: Iterable[Mapping[str, Tensor] | None], bucket_bytes: int) -> Iterator[FlatBucket | None]:
    """None for each layer that another rank has. What is larger than `bucket_bytes` and cannot be parted is a bucket of its
    own."""
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
    """Tensors that one update has to bring together. A first one waits for its second, if need be to the end: other models
    have only one of them."""
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


def flatten(tensors: list[tuple[str, Tensor]], *, index: int, last: bool) -> FlatBucket:
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    flat = [tensor.reshape(-1) for _, tensor in ordered]
    if any(part.dtype != flat[0].dtype for part in flat):
        flat = [part.view(torch.uint8) for part in flat]
    return FlatBucket(
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
    """Of each: several at a time, since to hash takes longer than to copy."""
    if any(tensor.is_cuda for tensor in tensors):
        # Other threads have streams of their own.
        torch.cuda.current_stream().synchronize()
    with ThreadPoolExecutor(HASHERS) as hashers:
        return list(hashers.map(checksum, tensors))


def bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = on_host(tensor.detach().contiguous()).view(-1).view(torch.uint8).numpy().data
    return data
