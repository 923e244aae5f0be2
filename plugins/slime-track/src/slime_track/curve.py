"""Curve: a metric over the steps of a run, in as many points as a picture can show."""

from __future__ import annotations

from typing import Final, NamedTuple

MOST: Final = 4096
"""A panel is 700 pixels wide."""


class Sum(NamedTuple):
    steps: float
    values: float
    count: int


class Curve:
    """A point for each measurement, in the order of steps. Where there would be more than `MOST`, two neighbours become one,
    their mean: a run goes on for weeks, and keeps this as long."""

    def __init__(self) -> None:
        self._sums: list[Sum] = []
        self._per_point = 1

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, step: int, value: float) -> None:
        """Rollout steps that were trained before the measurement, and what was measured."""
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
        """Steps and values."""
        return [one.steps / one.count for one in self._sums], [one.values / one.count for one in self._sums]


def together(first: Sum, second: Sum) -> Sum:
    return Sum(first.steps + second.steps, first.values + second.values, first.count + second.count)
