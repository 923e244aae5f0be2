"""Offloading: moves what Megatron keeps on the GPU to the host while the trainer sleeps, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from slime_megatron.optimizer import parts_of
from slime_training.offload import TrainerOffloader
from slime_training.rounded_adamw import StochasticRoundingAdamW


class Residency:
    def __init__(self, chunks: Sequence[Any], optimizer: MegatronOptimizer, device: torch.device) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._device = device
        self._parking = TrainerOffloader(device)
        self._expects = False
        """Host memory for the moments is allocated, or being allocated."""
        self._freed: list[tuple[Tensor, int]] = []
        """Freed gradient buffers, and their bytes."""

    def sleep(self, *, keep_weights: bool) -> None:
        if not self._freed:
            self._optimizer.zero_grad()
        weights = [tensor for chunk in self._chunks for tensor in [*chunk.module.parameters(), *chunk.module.buffers()]]
        if not self._expects:
            self._expects = True
            sizes = [moment_sizes(each, self._device.type) for each in self._optimizers()]
            self._parking.expect(chain.from_iterable(sizes))
        self._parking.sleep(weights, list(self._main_weights()), self._moments(), keep_weights=keep_weights)
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

    def _optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Torch's, which step on the weights of this rank."""
        for part in parts_of(self._optimizer):
            if part.optimizer is not None:
                yield part.optimizer

    def _main_weights(self) -> Iterator[Tensor]:
        """The model's own, or views of them, if an optimizer steps on these."""
        for optimizer in self._optimizers():
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])

    def _moments(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def moment_sizes(optimizer: torch.optim.Optimizer, device: str) -> Iterator[int]:
    """Bytes of each tensor that the first step will add to the optimizer's state on the device of this type."""
    if optimizer.state or isinstance(optimizer, HybridDeviceOptimizer):
        return
    for group in optimizer.param_groups:
        # Adam has two moments, SGD with momentum one.
        count = 2 if "betas" in group else bool(group.get("momentum"))
        for parameter in group["params"]:
            if parameter.device.type != device:
                continue
            dtypes = (parameter.dtype,) * count
            if isinstance(optimizer, StochasticRoundingAdamW):
                dtypes = tuple(optimizer.moment_dtypes.values())
            yield from (parameter.numel() * dtype.itemsize for dtype in dtypes)
            # The number of its step.
            yield torch.float32.itemsize
