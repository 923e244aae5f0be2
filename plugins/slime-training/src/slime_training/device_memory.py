"""Errors of a device without memory, as the kernel's OutOfDeviceMemory."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from slime_core.contracts.backend import OutOfDeviceMemory

CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
"""In the message of the RuntimeError that torch raises for a CPU's memory."""


@contextmanager
def reports_out_of_memory(number: int | Callable[[], int], drop: Callable[[], None]) -> Iterator[None]:
    """Raises OutOfDeviceMemory where torch has no memory. `number`: position of the current micro-batch. `drop`: drops
    gradients and what else an interrupted step leaves; called when the step's activations are freed."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).splitlines()[0]
        # The frames hold the activations.
        traceback.clear_frames(error.__traceback__)
    else:
        return
    gc.collect()
    drop()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfDeviceMemory(number if isinstance(number, int) else number(), message)


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)
