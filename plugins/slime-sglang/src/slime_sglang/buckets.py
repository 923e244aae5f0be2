"""A bucket as SGLang takes it at /update_weights_from_tensor, and whether it fits the model.

SGLang unpickles what it is sent, with a list of allowed modules. What is pickled here is a description: plain values,
and a call of torch that maps a file of shared memory or wraps bytes. Neither side starts a helper process for it.
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
import xxhash

from slime_core.errors import EngineError, near_matches
from slime_core.types.weights import Bucket
from slime_sglang.transports.flat import STACKED, partner_of

ALIGNMENT: Final = 16
"""Bytes: a view of another dtype has to begin at a multiple of its size."""
LISTED: Final = 8


class Call:
    """Unpickled, it is what the function returns."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return self._function, ()


class SharedBytes:
    """Bytes that a process of this user on this machine can map by `path`, until `close`. They have no name in any file
    system: however this process ends, nothing of them stays."""

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
        """Maps `size` bytes as a tensor, in the process that calls it."""
        return functools.partial(torch.from_file, self.path, shared=True, size=size, dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def payload(bucket: Bucket, *, shared: bool) -> Iterator[str]:
    """The bucket, serialised; `shared`: the server is on this machine, and reads the tensors from shared memory while
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
    """As `FlattenedTensorMetadata` of SGLang; `start` and `end` in bytes."""
    return types.SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)


def serialized(flat: Callable[[], Any], metadata: list[types.SimpleNamespace]) -> str:
    """`flat`: makes the buffer (bytes,) on the server, by functions that may be unpickled there."""
    return base64.b64encode(pickle.dumps({"flattened_tensor": Call(flat), "metadata": metadata})).decode()


def update_body(payloads: Sequence[str], *, version: int, last: bool, other_draft: bool) -> dict[str, Any]:
    """For /update_weights_from_tensor. `payloads`: for each rank of the server. `last`: the version is whole with it.
    `other_draft`: the draft of speculative decoding has weights of its own."""
    body: dict[str, Any] = {
        "serialized_named_tensors": payloads,
        "load_format": "flattened_bucket",
        # With waiting requests SGLang would die of it.
        "flush_cache": False,
        "disable_draft_model": other_draft,
    }
    return body | {"weight_version": str(version)} if last else body


def layout(bucket: Bucket) -> tuple[list[tuple[int, int]], int]:
    """(start, end) of each tensor in bytes, and the size of all."""
    places = []
    position = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        size = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        places.append((position, position + size))
        position += -(-size // ALIGNMENT) * ALIGNMENT
    return places, max(position, 1)


class BucketOrder:
    """Takes the buckets of one version after the other, each version from index 0 to the one marked last."""

    def __init__(self, model_path: Path, engine: str) -> None:
        self._engine = engine
        self._shapes = shapes_in(model_path)
        self._version = -1
        self._next = 0
        self._arrived: set[str] = set()
        self.incomplete = False
        """Some tensors of a version have been loaded and others not: nothing may be sampled."""

    def check(self, bucket: Bucket) -> None:
        """EngineError, before anything is loaded, if the bucket is out of order, damaged or another model's; at the last
        one also if tensors are missing. The version must then be sent again from its first bucket."""
        where = f"{self._engine}: bucket {bucket.index} of version {bucket.version}"
        if bucket.index == 0:
            self._version, self._next = bucket.version, 0
            self._arrived = set()
        expected, self._next = self._next, -1
        if (bucket.version, bucket.index) != (self._version, expected):
            wanted = "0" if expected < 0 else f"{expected} of version {self._version}, or 0"
            raise EngineError(f"{where} is out of order: expected index {wanted} to start again.")
        found = xxhash.xxh3_64_hexdigest(np.ascontiguousarray(bucket.data).data)
        if found != bucket.checksum:
            raise EngineError(f"{where} is damaged: checksum {bucket.checksum} was sent, its bytes have {found}.")
        size = sum(end - start for start, end in layout(bucket)[0])
        if size != bucket.data.nbytes:
            raise EngineError(f"{where} is damaged: its tensors need {size} bytes, it holds {bucket.data.nbytes}.")
        problems = [*self._problems(bucket), *parted(bucket)]
        if problems:
            raise EngineError(f"{where} does not fit the model: {'; '.join(problems)}.")
        arrived = self._arrived | set(bucket.names)
        if bucket.last:
            missing = sorted(set(self._shapes) - arrived - TIED)
            if missing:
                raise EngineError(f"{where} is the last, but tensors of the model are missing: {listed(missing)}.")

    def loaded(self, bucket: Bucket) -> None:
        self._arrived |= set(bucket.names)
        self._next = -1 if bucket.last else bucket.index + 1
        self.incomplete = not bucket.last

    def _problems(self, bucket: Bucket) -> list[str]:
        if not self._shapes:
            return []
        problems = []
        # A tied head may be in the folder under either name, or under both.
        unexpected = [name for name in bucket.names if name not in self._shapes and name not in TIED]
        if unexpected:
            close = near_matches(unexpected[0], self._shapes)
            hint = f" (close to {unexpected[0]}: {', '.join(close)})" if close else ""
            problems.append(f"unexpected names {listed(unexpected)}{hint}")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            own = self._shapes.get(name)
            if own is not None and tuple(shape) != own:
                problems.append(f"{name} has shape {tuple(shape)}, the model's is {own}")
        return problems


def parted(bucket: Bucket) -> list[str]:
    """What SGLang would forget without saying so: which of the two comes alone, other models may have it alone."""
    alone = [name for name in bucket.names if f".{STACKED[0]}." in name and partner_of(name) not in bucket.names]
    return [
        f'{name} comes without {partner_of(name)}, and SGLang loads them only together: use sync.transport = "ipc" or '
        '"distributed", or another sync.update_weight_buffer_size'
        for name in alone[:1]
    ]


TIED: Final = frozenset({"lm_head.weight"})
"""May be left out where it is the embedding."""


def shapes_in(model_path: Path) -> Mapping[str, tuple[int, ...]]:
    """Of the tensors in the folder's safetensors files, from their headers; empty if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return shapes


def listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
