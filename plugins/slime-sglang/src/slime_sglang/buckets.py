"""Serializes buckets for SGLang's /update_weights_from_tensor, and checks whether they fit the model.

SGLang unpickles requests with a list of allowed modules. A description is pickled here: plain values, and a call of torch
that maps a file of shared memory or wraps bytes. Neither side starts a helper process for it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import pickle
import struct
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from slime_core.errors import EngineError
from slime_core.types.weights import Bucket
from slime_sglang.transports.flattened_bucket import STACKED, partner_of
from slime_training.bucket_order import BucketOrder, missing_error, unexpected_problem

ALIGNMENT: Final = 16
"""In bytes. A view of another dtype must begin at a multiple of its size."""


class Call:
    """Unpickles to the result of a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return self._function, ()


class SharedBytes:
    """Bytes that processes of this user on this machine can map by `path`, until `close`. They have no name in a file system,
    so nothing is left, however this process ends."""

    def __init__(self, data: memoryview) -> None:
        self._descriptor = os.memfd_create("slime-weights")
        try:
            with open(self._descriptor, "wb", closefd=False) as file:
                # An empty file cannot be mapped.
                file.write(data if data.nbytes else b"\0")
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def mapped(self, size: int) -> Callable[[], Any]:
        """A function that maps `size` bytes as a tensor, in the process that calls it."""
        return functools.partial(torch.from_file, self.path, shared=True, size=size, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def payload(bucket: Bucket, *, shared: bool) -> Iterator[str]:
    """Yields the serialized bucket. `shared`: the server is on this machine, and reads the tensors from shared memory while
    the context is open."""
    places, size = layout(bucket)
    data = np.zeros(size, np.uint8)
    metadata = []
    offset = 0
    for name, dtype, shape, (start, end) in zip(bucket.names, bucket.dtypes, bucket.shapes, places, strict=True):
        data[start:end] = bucket.data[offset : offset + end - start]
        offset += end - start
        metadata.append(tensor_metadata(name, getattr(torch, dtype), tuple(shape), start, end))
    with contextlib.ExitStack() as stack:
        if shared:
            memory = SharedBytes(data.data)
            stack.callback(memory.close)
            yield serialized(memory.mapped(size), metadata)
        else:
            yield serialized(functools.partial(torch.frombuffer, bytearray(data.data), dtype=torch.uint8), metadata)


def tensor_metadata(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], start: int, end: int
) -> types.SimpleNamespace:
    """An object with the attributes of SGLang's `FlattenedTensorMetadata`; `start` and `end` in bytes."""
    return types.SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)


def serialized(flat: Callable[[], Any], metadata: list[types.SimpleNamespace]) -> str:
    """The request's text. `flat`: returns the buffer (bytes,) on the server, by functions that may be unpickled there."""
    return base64.b64encode(pickle.dumps({"flattened_tensor": Call(flat), "metadata": metadata})).decode()


def update_body(payloads: Sequence[str], *, version: int, last: bool, other_draft: bool) -> dict[str, Any]:
    """The body for /update_weights_from_tensor. `payloads`: one per rank of the server. `last`: the bucket completes the
    version. `other_draft`: the draft of speculative decoding has its own weights."""
    body: dict[str, Any] = {
        "serialized_named_tensors": payloads,
        "load_format": "flattened_bucket",
        # With waiting requests SGLang would crash.
        "flush_cache": False,
        "disable_draft_model": other_draft,
    }
    return body | {"weight_version": str(version)} if last else body


def layout(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of each tensor in bytes, and the total size."""
    places = []
    position = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        size = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        places.append((position, position + size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return places, max(position, 1)


class CheckedBuckets(BucketOrder):
    """Checks that buckets arrive in order, with the tensors of a model folder."""

    def __init__(self, model_path: Path, engine: str) -> None:
        super().__init__(engine)
        self._shapes = shapes_in(model_path)

    def check(self, bucket: Bucket) -> None:
        """Raises EngineError, before anything is loaded, if the bucket is out of order, damaged or of another model, or if it
        is the last one and tensors are missing. The version must then be sent again from its first bucket."""
        where = self.expect(bucket)
        size = sum(end - start for start, end in layout(bucket)[0])
        if size != bucket.data.nbytes:
            raise EngineError(f"{where} is damaged: its tensors need {size} bytes, it holds {bucket.data.nbytes}.")
        problems = [*self._problems(bucket), *parted(bucket)]
        if problems:
            raise EngineError(f"{where} does not fit the model: {'; '.join(problems)}.")
        if bucket.last:
            missing = sorted(set(self._shapes) - self.arrived_with(bucket) - TIED)
            if missing:
                raise missing_error(where, missing)

    def _problems(self, bucket: Bucket) -> list[str]:
        if not self._shapes:
            return []
        problems = []
        # A tied head may be in the folder under either name, or under both.
        unexpected = [name for name in bucket.names if name not in self._shapes and name not in TIED]
        if unexpected:
            problems.append(unexpected_problem(unexpected, self._shapes))
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            own = self._shapes.get(name)
            if own is not None and tuple(shape) != own:
                problems.append(f"{name} has shape {tuple(shape)}, the model's is {own}")
        return problems


def parted(bucket: Bucket) -> list[str]:
    """Names of stacked tensors whose partner is not in the bucket: SGLang would lose them without an error."""
    alone = [name for name in bucket.names if f".{STACKED[0]}." in name and partner_of(name) not in bucket.names]
    return [
        f'{name} is without {partner_of(name)}, and SGLang loads them only together: set sync.transport = "ipc" or '
        '"distributed", or another sync.update_weight_buffer_size'
        for name in alone[:1]
    ]


TIED: Final = frozenset({"lm_head.weight"})
"""Tensors that may be missing if they are the embedding."""


def shapes_in(model_path: Path) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the tensors in the folder's safetensors files, from their headers; {} if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes
