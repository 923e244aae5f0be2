"""The order in which rows are drawn: endless epochs, and the choice among weighted files.

It depends only on the seed and a position, so a checkpoint only has the position. Random numbers are raw output of the bit
generator, which numpy keeps the same in all releases, unlike `permutation` and `choice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ORDER, _PICK = 0, 1
"""First words of the seeds, so that orders and picks are independent."""


class EpochOrder:
    """Endless epochs of the numbers 0 .. num_rows - 1, in order, or shuffled in each epoch by seed + epoch."""

    def __init__(self, num_rows: int, *, seed: int, stream: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.epoch = 0
        self.offset = 0
        self._seed = seed
        self._stream = stream
        self._shuffle = shuffle
        self._shuffled: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def epoch_ended(self) -> bool:
        return self.offset == self.num_rows

    def next_row(self) -> int:
        if self.epoch_ended:
            self.epoch += 1
            self.offset = 0
        row = int(self._permutation()[self.offset]) if self._shuffle else self.offset
        self.offset += 1
        return row

    def _permutation(self) -> npt.NDArray[np.int64]:
        if self._shuffled is None or self._shuffled[0] != self.epoch:
            words = [_ORDER, (self._seed + self.epoch) % 2**64, self._stream]
            keys = np.random.PCG64(words).random_raw(self.num_rows)
            self._shuffled = self.epoch, np.argsort(keys, kind="stable")
        return self._shuffled[1]


class WeightedPicks:
    """An endless series of stream numbers, each drawn by weight. `count` is its position."""

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._seed = seed
        self._upper = np.cumsum(weights) / np.sum(weights)
        self.move_to(0)

    def move_to(self, count: int) -> None:
        self.count = count
        self._bits = np.random.PCG64([_PICK, self._seed % 2**64]).advance(count)

    def next_stream(self) -> int:
        uniform = (self._bits.random_raw() >> 11) * 2.0**-53
        self.count += 1
        # The last bound may round to just below 1.
        return min(int(np.searchsorted(self._upper, uniform, side="right")), len(self._upper) - 1)
