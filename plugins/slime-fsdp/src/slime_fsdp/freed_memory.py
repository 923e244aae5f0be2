"""Keeps freed memory on a CPU for the next allocation instead of returning it to the system."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

# Names and numbers of glibc's malloc.h; 32 MiB is the largest threshold that it takes.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGEST_MMAP_THRESHOLD: Final = 2**25
NEVER: Final = 2**31 - 1


def keep_freed_memory() -> None:
    """Activations of up to 32 MiB come out of the heap, which does not shrink. Does nothing without glibc.

    By default every such tensor is a mapping of its own: new pages, zeroed by the system, at every allocation. Measured
    a tenth of the time of a training step of a small model.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, NEVER)
