"""Errors of a device without memory, as the kernel's OutOfDeviceMemory."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from slime_core.contracts.backend import OutOfDeviceMemory
from slime_core.errors import TrainingError

CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"
"""In the message of the RuntimeError that torch raises for a CPU's memory."""


@contextmanager
def reports_out_of_memory(number: int | Callable[[], int], drop: Callable[[], None]) -> Iterator[None]:
    """Raises OutOfDeviceMemory where torch has no memory. `number`: position of the current micro-batch. `drop`: drops
    gradients and what else an interrupted step leaves; called when the step's activations are freed."""
    try:
        yield
    except (RuntimeError, TrainingError) as error:
        # The boundary to plugins has given a loss's error its name.
        raised = error.__cause__ if isinstance(error, TrainingError) else error
        if raised is None or not is_out_of_memory(raised):
            raise
        message = str(raised).splitlines()[0]
        # The frames hold the activations.
        for one in (error, raised):
            traceback.clear_frames(one.__traceback__)
    else:
        return
    gc.collect()
    drop()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfDeviceMemory(number if isinstance(number, int) else number(), message)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (
        isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error)
    )
