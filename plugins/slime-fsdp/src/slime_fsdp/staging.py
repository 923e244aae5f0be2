"""Copies the state to save to the host at one instant, so that it can be written while training continues."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime_training.host_memory import HostCopy
from slime_training.rounded_adamw import local


class Staging:
    """Host memory for one copy of tensors, allocated on first use and kept."""

    def __init__(self, device: torch.device) -> None:
        self._copy = HostCopy(device)

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns copies on the host, which the next call overwrites."""
        values = self._copy.of({name: local(tensor.detach()) for name, tensor in tensors.items()})
        # The same spec places the shard; from_local would move it back to the GPU.
        return {
            name: DTensor(values[name], tensor._spec, requires_grad=False)
            if isinstance(tensor, DTensor)
            else values[name]
            for name, tensor in tensors.items()
        }
