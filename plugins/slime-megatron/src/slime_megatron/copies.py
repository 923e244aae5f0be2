"""Frozen copies of the weights, in host memory; swapped into the model's own tensors while they are scored with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

Values = dict[str, Tensor]


def copied(tensors: Mapping[str, Tensor]) -> Values:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def put(values: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        tensors[name].copy_(value, non_blocking=True)


@contextmanager
def replaced(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    kept = copied(tensors)
    put(values, tensors)
    try:
        yield
    finally:
        put(kept, tensors)
