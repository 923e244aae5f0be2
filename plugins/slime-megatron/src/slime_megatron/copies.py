"""Frozen copies of the weights, in host memory; swapped into the model's own tensors while they are scored with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from slime_megatron.weights import local_tensors
from slime_training.host_memory import HostCopy


class Copies:
    """By name, each in memory of its own."""

    def __init__(self, chunks: Sequence[Any], device: torch.device) -> None:
        """`chunks`: the model's, without wrapping."""
        self._chunks = chunks
        self._device = device
        self._values: dict[str, Mapping[str, Tensor]] = {}
        self._memory: dict[str, HostCopy] = {}
        self._aside = HostCopy(device)

    @property
    def names(self) -> list[str]:
        return list(self._values)

    def take(self, name: str) -> None:
        """What is in the model becomes the copy `name`."""
        memory = self._memory.setdefault(name, HostCopy(self._device))
        self._values[name] = memory.of(local_tensors(self._chunks))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Whatever comes into the model inside, afterwards it has the weights of before."""
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
