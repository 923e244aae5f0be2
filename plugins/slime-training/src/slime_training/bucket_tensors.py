"""The tensors of a bucket, for those who read it on the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from slime_core.types.weights import Bucket


def tensors_of(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """(name, copy on the CPU), one after the other. Copies, because a tensor may start at an odd byte, and the buffer may be
    read-only and belongs to the caller."""
    offset = 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        end = offset + torch.Size(shape).numel() * kind.itemsize
        yield name, torch.from_numpy(np.array(bucket.data[offset:end])).view(kind).reshape(shape)
        offset = end
