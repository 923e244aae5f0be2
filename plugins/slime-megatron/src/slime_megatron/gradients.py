"""The buffers in which Megatron's DistributedDataParallel sums gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gradient_buffers(chunks: Sequence[Any]) -> list[Any]:
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def copied_gradients(chunks: Sequence[Any]) -> list[Tensor]:
    """Copies of gradients that are summed over ranks: summed again with those of further micro-batches, they would count once
    for each rank."""
    return [buffer.grad_data.clone() for buffer in gradient_buffers(chunks)]


@torch.no_grad()
def add_gradients(chunks: Sequence[Any], earlier: Sequence[Tensor]) -> None:
    """Adds what `copied_gradients` returned; an empty list adds nothing."""
    for buffer, gradient in zip(gradient_buffers(chunks) if earlier else (), earlier, strict=True):
        buffer.grad_data.add_(gradient)
