"""Curve: a metric over the steps of a run, with at most as many points as a plot can show."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST: Final = 4096
"""Largest number of points; a panel is 700 pixels wide."""


class Sum(NamedTuple):
    steps: float
    values: float
    count: int


class Curve:
    """One point for each measurement, in the order of steps. If there are more than `MOST`, neighboring pairs are averaged,
    so that the memory of a long run stays bounded."""

    def __init__(self) -> None:
        self._sums: list[Sum] = []
        self._per_point = 1

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, step: int, value: float) -> None:
        """`step`: rollout steps trained before the measurement; `value`: the measurement."""
        one = Sum(step, value, 1)
        if self._sums and self._sums[-1].count < self._per_point:
            self._sums[-1] = together(self._sums[-1], one)
            return
        self._sums.append(one)
        if len(self._sums) > MOST:
            pairs = [self._sums[start : start + 2] for start in range(0, len(self._sums), 2)]
            self._sums = [together(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self._per_point *= 2

    @property
    def points(self) -> tuple[list[float], list[float]]:
        """(steps, values) of the points."""
        return [one.steps / one.count for one in self._sums], [one.values / one.count for one in self._sums]


def together(first: Sum, second: Sum) -> Sum:
    return Sum(first.steps + second.steps, first.values + second.values, first.count + second.count)
