"""Parking: the memory of tensors, given back by the device while a trainer sleeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from slime_training.host_memory import HostMemory, starts_of


class Parking:
    """What tensors hold on a device, brought to the host and back. They stay the objects that they are, with all that points
    at them: views, shards, states of an optimiser. In between nothing may read them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = HostMemory(device)
        self._parked: list[tuple[torch.UntypedStorage, Tensor]] = []

    def park(self, tensors: Iterable[Tensor], *, but: Iterable[Tensor] = ()) -> None:
        """With all that shares their memory, but for what shares it with `but`. Does nothing for tensors that are elsewhere,
        and if it was done already."""
        if self._parked:
            return
        others = storages_of(but, self._device)
        storages = [one for key, one in storages_of(tensors, self._device).items() if key not in others]
        starts = starts_of(storage.nbytes() for storage in storages)
        room = self._memory.room(starts[-1])
        parked = []
        for storage, start in zip(storages, starts, strict=False):
            place = room[start : start + storage.nbytes()]
            place.copy_(bytes_of(storage), non_blocking=True)
            parked.append((storage, place))
        self._wait()
        self._parked = parked
        for storage in storages:
            storage.resize_(0)

    def bring_back(self) -> None:
        """What is parked, if anything is: all of it, or, where the device has too little memory, nothing."""
        with ExitStack() as back_again:
            for storage, place in self._parked:
                back_again.callback(storage.resize_, 0)
                storage.resize_(len(place))
                bytes_of(storage).copy_(place, non_blocking=True)
            self._wait()
            back_again.pop_all()
        self._parked = []

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class TrainerParking:
    """A trainer's memory in the two parts that `TrainBackend.sleep` and `wake` know."""

    def __init__(self, device: torch.device) -> None:
        self._weights, self._others = Parking(device), Parking(device)

    def sleep(self, weights: Sequence[Tensor], others: Iterable[Tensor], *, keep_weights: bool) -> None:
        """`weights`: what `export_tensors` reads. `others` may be views of them."""
        self._others.park(others, but=weights)
        if not keep_weights:
            self._weights.park(weights)

    def wake(self, *, weights_only: bool) -> None:
        self._weights.bring_back()
        if not weights_only:
            self._others.bring_back()


def storages_of(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """By address, each once; without empty ones, and those that a file is mapped to."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == device.type)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes() and storage.resizable()}


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
