"""Offloading: moves what Megatron keeps on the GPU to the host while the trainer sleeps, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from slime_megatron.optimizer import parts_of
from slime_training.offload import TrainerOffloader


class Residency:
    def __init__(self, chunks: Sequence[Any], optimizer: MegatronOptimizer, device: torch.device) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._parking = TrainerOffloader(device)
        self._freed: list[tuple[Tensor, int]] = []
        """Freed gradient buffers, and their bytes."""

    def sleep(self, *, keep_weights: bool) -> None:
        if not self._freed:
            self._optimizer.zero_grad()
        weights = [tensor for chunk in self._chunks for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]]
        self._parking.sleep(weights, self._states(), keep_weights=keep_weights)
        for gradients in self._gradients():
            storage = gradients.untyped_storage()
            if storage.nbytes():
                self._freed.append((gradients, storage.nbytes()))
                storage.resize_(0)

    def wake_up(self, *, weights_only: bool) -> None:
        self._parking.wake_up(weights_only=weights_only)
        if not weights_only:
            while self._freed:
                gradients, nbytes = self._freed[-1]
                gradients.untyped_storage().resize_(nbytes)
                gradients.zero_()
                self._freed.pop()

    def _gradients(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                yield buffer.grad_data

    def _states(self) -> Iterator[Tensor]:
        """Main weights and moments. If an optimizer steps on the model's own weights, they are included."""
        for part in parts_of(self._optimizer):
            if part.optimizer is None:
                continue
            yield from (parameter for group in part.optimizer.param_groups for parameter in group["params"])
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
