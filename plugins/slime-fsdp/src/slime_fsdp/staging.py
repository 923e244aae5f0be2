"""What is saved, copied to the host at one instant, so that it can be written while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from slime_training.host_memory import HostCopy
from slime_training.rounded_adamw import local


class Staging:
    """Host memory for one copy, taken when it is first wanted and kept."""

    def __init__(self, device: torch.device) -> None:
        self._copy = HostCopy(device)

    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """They are overwritten by the next call."""
        values = self._copy.of({name: local(tensor.detach()) for name, tensor in tensors.items()})
        # Where a shard belongs is told by the same record; from_local would bring it back to the GPU.
        return {
            name: DTensor(values[name], tensor._spec, requires_grad=False)
            if isinstance(tensor, DTensor)
            else values[name]
            for name, tensor in tensors.items()
        }
