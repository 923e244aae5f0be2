"""CPU threads of the engine: of torch's operations, and for parts of a decode step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

import torch

P = TypeVar("P")
T = TypeVar("T")

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


class PartThreads:
    """Computes parts of a decode step side by side, each operation in one thread.

    Operations of a small model are too short to be divided, but its rows are not: each thread takes every `count`-th part. The
    results do not depend on the number of threads.
    """

    def __init__(self, count: int) -> None:
        """`count`: threads with the caller's own."""
        self._count = count
        self._pool = ThreadPoolExecutor(max(count - 1, 1), "decode", initializer=use_threads, initargs=(1,))

    def map(self, compute: Callable[[P], T], parts: Sequence[P]) -> list[T]:
        """`compute` of each part, in order. Raises what one of them raised, once all have ended."""

        @torch.inference_mode()
        def share(first: int) -> list[T]:
            return [compute(part) for part in parts[first :: self._count]]

        others = [self._pool.submit(share, first) for first in range(1, min(self._count, len(parts)))]
        try:
            shares = [share(0)]
        finally:
            wait(others)
        shares += [other.result() for other in others]
        return [shares[place % self._count][place // self._count] for place in range(len(parts))]

    def close(self) -> None:
        self._pool.shutdown()


def part_threads(asked: int, num_parameters: int, *, reads_only: bool) -> int:
    """Threads of `PartThreads`: those that `choose_threads` leaves unused. `reads_only`: the model's forward changes nothing
    in the model."""
    free = not asked and num_parameters < SMALL_MODEL and reads_only
    return torch.get_num_threads() if free else 1
