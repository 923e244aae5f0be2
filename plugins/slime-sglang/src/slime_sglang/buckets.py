"""Serializes buckets for SGLang's /update_weights_from_tensor, and checks whether SGLang can load them.

SGLang unpickles requests with a list of allowed modules. A description is pickled here: plain values, and a call of torch
that maps a file of shared memory or wraps bytes. Neither side starts a helper process for it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from slime_core.types.weights import Bucket
from slime_serving.checked_buckets import CheckedBuckets, layout
from slime_serving.shared_bytes import SharedBytes
from slime_transports.flattened_bucket import STACKED, partner_of


class Call:
    """Unpickles to the result of a function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return self._function, ()


def mapped(memory: SharedBytes, size: int) -> Callable[[], Any]:
    """A function that maps `size` bytes as a tensor, in the process that calls it."""
    return functools.partial(torch.from_file, memory.path, shared=True, size=size, dtype=torch.uint8)


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
            yield serialized(mapped(memory, size), metadata)
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


class SglangBuckets(CheckedBuckets):
    def further_problems(self, bucket: Bucket) -> Sequence[str]:
        return parted(bucket)


def parted(bucket: Bucket) -> list[str]:
    """Names of stacked tensors whose partner is not in the bucket: SGLang would lose them without an error."""
    alone = [name for name in bucket.names if f".{STACKED[0]}." in name and partner_of(name) not in bucket.names]
    return [
        f'{name} is without {partner_of(name)}, and SGLang loads them only together: set sync.transport = "ipc" or '
        '"distributed", or another sync.update_weight_buffer_size'
        for name in alone[:1]
    ]
