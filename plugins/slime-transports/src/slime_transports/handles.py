"""Buckets by reference: a payload states where the bytes are."""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_serving.shared_bytes import SharedBytes
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import FlattenedBucket
from slime_transports.receiver import WeightReceiver


def without_data(bucket: FlattenedBucket) -> FlattenedBucket:
    """What a payload describes of a bucket, without its memory: as long as it was kept, the device could not reuse it."""
    return replace(bucket, data=torch.empty_like(bucket.data, device="meta"))


class SharedMemory:
    """A bucket in shared memory, until `close`."""

    def __init__(self, bucket: FlattenedBucket) -> None:
        self._bucket = without_data(bucket)
        self._memory = SharedBytes(bucket.data.cpu().numpy().data)

    def payload(self, receiver: type[WeightReceiver]) -> str:
        """What is sent to a server on this machine."""
        return receiver.mapped(self._memory, self._bucket)

    def close(self) -> None:
        self._memory.close()


class DeviceMemory:
    """A bucket on this rank's device. See `DeviceHandle`."""

    def __init__(self, bucket: FlattenedBucket) -> None:
        self._bucket = without_data(bucket)
        self._handle: DeviceHandle | None = DeviceHandle.of(bucket.data)

    def payload(self, receiver: type[WeightReceiver]) -> str:
        """What is sent to the server's rank on the same device."""
        assert self._handle is not None
        return receiver.opened(self._handle, self._bucket)

    def release(self) -> None:
        """A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.release()
