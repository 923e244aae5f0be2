"""Karmarkar-Karp: divides items into bins of equal count and nearly equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def karmarkar_karp(weights: Sequence[float], num_bins: int) -> list[list[int]]:
    """Returns the item positions of each bin; len(weights) must be a multiple of num_bins.

    Largest differencing with k items at a time, so that counts stay equal: each state holds k partial bins; the two
    states with the largest spread are merged, heaviest bin onto lightest.
    (Karmarkar and Karp, The Differencing Method of Set Partitioning, 1982.)

    >>> karmarkar_karp([8, 7, 6, 5], 2)
    [[0, 3], [1, 2]]
    """
    if len(weights) % num_bins:
        raise ValueError(f"{len(weights)} items do not spread evenly over {num_bins} bins")
    order = np.argsort(-np.asarray(weights, np.float64), kind="stable").tolist()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), num_bins):
        bins = [(float(weights[item]), [item]) for item in order[start : start + num_bins]]
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], start, bins))
    while len(heap) > 1:
        _, first_number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # Both are sorted heaviest first, so reversing one pairs heavy with light.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], first_number, merged))
    if not heap:
        return [[] for _ in range(num_bins)]
    return sorted(sorted(items) for _, items in heap[0][2])
