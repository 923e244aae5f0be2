"""Frozen copies of the weights, in host memory; swapped into the model's own tensors for a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime_megatron.weights import local_tensors
from slime_training.host_memory import HostCopy


class FrozenModels:
    """Copies by name, each in memory of its own."""

    def __init__(self, chunks: Sequence[Any], device: torch.device) -> None:
        """`chunks`: the model's pieces, without wrapping."""
        self._chunks = chunks
        self._device = device
        self._values: dict[str, Mapping[str, Tensor]] = {}
        self._memory: dict[str, HostCopy] = {}
        self._aside = HostCopy(device)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def take(self, name: str) -> None:
        """Copies the weights in the model as `name`."""
        memory = self._memory.setdefault(name, HostCopy(self._device))
        self._values[name] = memory.of(local_tensors(self._chunks))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restores the weights on exit, whatever was loaded into the model inside."""
        tensors = local_tensors(self._chunks)
        kept = self._aside.of(tensors)
        try:
            yield
        finally:
            put(kept, tensors)

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        with self.aside():
            put(self._values[name], local_tensors(self._chunks))
            yield


@torch.no_grad()
def put(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value, non_blocking=True)
