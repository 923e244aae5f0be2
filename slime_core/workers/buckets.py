"""Exported tensors to buckets in host memory, each with its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from slime_core.types.weights import Bucket


def buckets_of(
    layers: Iterable[Mapping[str, Tensor] | None], *, version: int, bucket_bytes: int
) -> Iterator[Bucket | None]:
    """Rank 0 yields a bucket once the next one has begun, so that the last one is marked. Other ranks yield None per layer."""
    pending: list[tuple[str, Tensor]] = []
    size = index = 0
    for layer in layers:
        if layer is None:
            yield None
            continue
        for name, tensor in layer.items():
            if pending and size + tensor.nbytes > bucket_bytes:
                yield make_bucket(pending, version=version, index=index, last=False)
                pending, size, index = [], 0, index + 1
            pending.append((name, tensor))
            size += tensor.nbytes
    if pending:
        yield make_bucket(pending, version=version, index=index, last=True)


def make_bucket(tensors: list[tuple[str, Tensor]], *, version: int, index: int, last: bool) -> Bucket:
    flat = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors])
    data: npt.NDArray[np.uint8] = page_locked(flat).numpy()
    return Bucket(
        version=version,
        index=index,
        last=last,
        names=tuple(name for name, _ in tensors),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors),
        shapes=tuple(tuple(tensor.shape) for _, tensor in tensors),
        data=data,
        checksum=xxhash.xxh3_64_hexdigest(data.data),
    )


def page_locked(tensor: Tensor) -> Tensor:
    """A tensor copied from a GPU to page-locked host memory, which torch's allocator keeps for the next copy."""
    if not tensor.is_cuda:
        return tensor
    with torch.cuda.device(tensor.device):
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
