"""What is saved, copied to the host at one instant, so that it can be written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime_core.training.rounded_adamw import local


class Staging:
    """Host memory for one copy, taken when it is first wanted and kept: page-locked where the copies come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """They are overwritten by the next call."""
        found = {name: self._copied(name, tensor.detach()) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return found

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        mine = local(tensor)
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (mine.shape, mine.dtype):
            buffer = torch.empty(mine.shape, dtype=mine.dtype, pin_memory=mine.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(mine, non_blocking=True)
        # Where the shard belongs is told by the same record; from_local would bring it back to the GPU.
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
