"""Buckets by reference: what SGLang unpickles is a description of where the bytes are.

It unpickles with a list of allowed modules; torch and types are among them.
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

from slime_sglang.buckets import SharedBytes, serialized, tensor_metadata
from slime_sglang.transports.flat import FlatBucket

DEVICE: Final = 6
"""Where `reduce_tensor` of a CUDA tensor has the device's number. Processes may number devices differently; SGLang takes
the device's UUID in its place."""
COUNTER: Final = slice(11, 13)
"""Where it has the counter's file, and the place in it."""


def description(bucket: FlatBucket) -> list[types.SimpleNamespace]:
    places = pairwise([0, *bucket.ends])
    tensors = zip(bucket.names, bucket.dtypes, bucket.shapes, places, strict=True)
    return [tensor_metadata(name, dtype, shape, *place) for name, dtype, shape, place in tensors]


class SharedMemory:
    """A bucket in shared memory, until `close`. `payload` is what a server on this machine is sent."""

    def __init__(self, bucket: FlatBucket) -> None:
        self._memory = SharedBytes(bucket.data.cpu().numpy().data)
        self.payload = serialized(self._memory.mapped(bucket.data.nbytes), description(bucket))

    def close(self) -> None:
        self._memory.close()


class HandlePickler(ForkingPickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.counters: list[tuple[bytes, int]] = []
        """Of what was pickled: where torch counts who has it."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        rebuild, arguments = reduce_tensor(obj)
        self.counters.append(arguments[COUNTER])
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :])


class DeviceMemory:
    """A bucket on this rank's device. `payload` is what the server's rank on the same device is sent.

    torch keeps the memory, also of a bucket that is gone here, until whoever has opened the handle has given it up: where
    that cannot come, `release` has to."""

    def __init__(self, bucket: FlatBucket) -> None:
        buffer = io.BytesIO()
        pickler = HandlePickler(buffer)
        pickler.dump({"flattened_tensor": bucket.data, "metadata": description(bucket)})
        self.payload = base64.b64encode(buffer.getvalue()).decode()
        self._counters = pickler.counters

    def release(self) -> None:
        """In the place of a reader that never opens it, or has died with it. Once is enough."""
        counters, self._counters = self._counters, []
        for handle, offset in counters:
            torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)
