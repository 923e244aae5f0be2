"""Offloads the memory of tensors while a trainer sleeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from slime_training.host_memory import HostMemory, starts_of


class TensorOffloader:
    """Moves the storage of tensors from a device to the host and back. The tensors stay the same objects, with all references
    to them: views, shards, states of an optimizer. In between nothing may read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = HostMemory(device)
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] = []

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocates host memory for tensors of these bytes in the background, before the first that are offloaded."""
        self._memory.reserve(starts_of(sizes)[-1])

    def offload(self, tensors: Iterable[Tensor], *, but: Iterable[Tensor] = ()) -> None:
        """Offloads these tensors and all that share their memory, except tensors that share it with `but`. Skips tensors that
        are not on the device, and does nothing if they are offloaded already."""
        if self._offloaded:
            return
        others = storages_of(but, self._device)
        storages = [one for key, one in storages_of(tensors, self._device).items() if key not in others]
        if not storages:
            return
        starts = starts_of(storage.nbytes() for storage in storages)
        room = self._memory.room(starts[-1])
        offloaded = []
        for storage, start in zip(storages, starts, strict=False):
            place = room[start : start + storage.nbytes()]
            place.copy_(bytes_of(storage), non_blocking=True)
            offloaded.append((storage, place))
        self._wait()
        self._offloaded = offloaded
        for storage in storages:
            storage.resize_(0)

    def onload(self) -> None:
        """Restores all that is offloaded. If the device has too little memory, nothing is restored and the error is raised."""
        with ExitStack() as back_again:
            for storage, place in self._offloaded:
                back_again.callback(storage.resize_, 0)
                storage.resize_(len(place))
                bytes_of(storage).copy_(place, non_blocking=True)
            self._wait()
            back_again.pop_all()
        self._offloaded = []

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TrainerOffloader:
    """The parts of a trainer's memory: weights, which `TrainBackend.sleep` and `wake_up` may treat alone, what it holds besides
    from its start on, and moments, which the first optimizer step creates."""

    def __init__(self, device: torch.device) -> None:
        self._weights, self._others, self._moments = (TensorOffloader(device) for _ in range(3))

    def expect(self, moments: Iterable[int]) -> None:
        """Called before the first `sleep`: bytes of each of the later `moments`. Their host memory is allocated in the
        background, so that neither that sleep nor a step waits for it."""
        self._moments.reserve(moments)

    def sleep(
        self, weights: Sequence[Tensor], others: Sequence[Tensor], moments: Iterable[Tensor], *, keep_weights: bool
    ) -> None:
        """`weights`: what `export_weights` reads. `others` may be views of them."""
        self._moments.offload(moments, but=weights)
        self._others.offload(others, but=weights)
        if not keep_weights:
            self._weights.offload(weights)

    def wake_up(self, *, weights_only: bool) -> None:
        self._weights.onload()
        if not weights_only:
            self._others.onload()
            self._moments.onload()


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Storages by address, each once, without empty ones and memory-mapped files."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes() and storage.resizable()}


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
