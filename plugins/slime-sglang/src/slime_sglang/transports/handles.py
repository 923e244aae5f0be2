"""Buckets by reference: SGLang unpickles a description of where the bytes are.

It unpickles with a list of allowed modules, which includes torch and types.
"""

from __future__ import annotations

import base64
import io
import types
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from slime_serving.shared_bytes import SharedBytes
from slime_sglang.buckets import mapped, serialized, tensor_metadata
from slime_sglang.transports.flattened_bucket import FlattenedBucket

DEVICE: Final = 6
"""Index of the device's number in the arguments of `reduce_tensor` of a CUDA tensor. Processes may number devices
differently, so SGLang takes the device's UUID instead."""
COUNTER: Final = slice(11, 13)
"""Indices of the file of the reference counter, and of the offset in it."""


def description(bucket: FlattenedBucket) -> list[types.SimpleNamespace]:
    places = pairwise([0, *bucket.ends])
    tensors = zip(bucket.names, bucket.dtypes, bucket.shapes, places, strict=True)
    return [tensor_metadata(name, dtype, shape, *place) for name, dtype, shape, place in tensors]


class SharedMemory:
    """A bucket in shared memory, until `close`. `payload`: sent to a server on this machine."""

    def __init__(self, bucket: FlattenedBucket) -> None:
        self._memory = SharedBytes(bucket.data.cpu().numpy().data)
        self.payload = serialized(mapped(self._memory, bucket.data.nbytes), description(bucket))

    def close(self) -> None:
        self._memory.close()


class HandlePickler(ForkingPickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.counters: list[tuple[bytes, int]] = []
        """torch's reference counters of the pickled tensors: (file, offset)."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reduce_tensor(obj)
        self.counters.append(arguments[COUNTER])
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


class DeviceMemory:
    """A bucket on this rank's device. `payload`: sent to the server's rank on the same device.

    torch keeps the memory, also of a deleted bucket, until the reader has closed the handle. If the reader cannot, call
    `release`."""

    def __init__(self, bucket: FlattenedBucket) -> None:
        buffer = io.BytesIO()
        pickler = HandlePickler(buffer)
        pickler.dump({"flattened_tensor": bucket.data, "metadata": description(bucket)})
        self.payload = base64.b64encode(buffer.getvalue()).decode()
        self._counters = pickler.counters

    def release(self) -> None:
        """Closes the handle instead of a reader that never opens it, or has died. A second call does nothing."""
        counters, self._counters = self._counters, []
        for handle, offset in counters:
            torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)
