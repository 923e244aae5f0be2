"""DeviceHandle: a CUDA IPC handle of a tensor, as torch makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

DEVICE: Final = 6
"""Index of the device's number in the arguments of `reduce_tensor` of a CUDA tensor. Processes may number devices
differently, so servers take the device's UUID instead."""
COUNTER: Final = slice(11, 13)
"""Indices of the file of the reference counter, and of the offset in it."""


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """torch keeps the memory, also of a deleted tensor, until the reader has closed the handle. If the reader cannot, call
    `release`."""

    rebuild: Callable[..., Tensor]
    """Function of torch that opens the handle in another process."""
    arguments: tuple[Any, ...]
    """Its arguments, with the device's UUID in place of its number."""

    @classmethod
    def of(cls, tensor: Tensor) -> DeviceHandle:
        rebuild, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        uuid = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
        return cls(rebuild, (*arguments[:DEVICE], uuid, *arguments[DEVICE + 1 :]))

    def release(self) -> None:
        """Closes the handle instead of a reader that never opens it, or has died. Only once."""
        handle, offset = self.arguments[COUNTER]
        torch.UntypedStorage._release_ipc_counter_cuda(handle, offset)
