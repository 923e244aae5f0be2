"""CPU threads of the engine's thread alone."""

from __future__ import annotations

import threading
from typing import Final

import torch

SMALL_MODEL: Final = 10_000_000
"""Parameters below which one thread decodes fastest: what an operation could share takes less time than waking others."""


def choose_threads(asked: int, num_parameters: int) -> int:
    """`asked` 0: one for a small model, else torch's own number."""
    return asked or (1 if num_parameters < SMALL_MODEL else torch.get_num_threads())


def use_threads(count: int) -> None:
    """For torch's operations in this thread; what other threads begin with stays as it is.

    A trainer in the same process has a thread, and with it a pool of OpenMP threads, of its own. As soon as the pools
    together are larger than the machine, OpenMP's threads sleep between operations instead of spinning, and to wake
    them costs small operations more than a second thread gains.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
    restoring.start()
    restoring.join()
