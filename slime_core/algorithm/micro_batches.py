"""Plans: which samples form which micro-batch, on which data-parallel rank, in which optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_core.algorithm.balance import karmarkar_karp
from slime_core.algorithm.flops import ModelShape
from slime_core.types.batch import Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """How large micro-batches may be."""

    max_tokens: int | None
    """Tokens of a packed micro-batch over all context-parallel ranks; None: `max_samples` samples each."""
    max_samples: int = 1
    multiple: int = 1
    """Micro-batches per rank must divide by it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """`ranks[r][m]` are the sample numbers of data-parallel rank r's micro-batch m, all ranks equally many; a
    micro-batch may be empty."""

    ranks: tuple[tuple[Int64, ...], ...]

    def samples_of(self, rank: int) -> Int64:
        return np.concatenate([np.empty(0, np.int64), *self.ranks[rank]])


def plan_step(
    samples: Int64, lengths: Int64, *, dp_size: int, limits: MicroBatchLimits, shape: ModelShape, balance: bool
) -> StepPlan:
    """Packs `samples` (numbers into `lengths`, tokens each) and spreads the micro-batches over the ranks.

    Every sample is placed exactly once. Counts per rank are equal: bins are split, heaviest first, until they divide,
    and when no bin can be split further, empty ones are added.
    """
    bins = pack(samples, lengths, limits)
    bins = divide(bins, lengths, dp_size * limits.multiple)
    if balance:
        flops = [float(shape.forward_flops(lengths[b]).sum()) for b in bins]
        spread = karmarkar_karp(flops, dp_size)
    else:
        spread = [list(range(rank, len(bins), dp_size)) for rank in range(dp_size)]
    return StepPlan(ranks=tuple(tuple(bins[number] for number in numbers) for numbers in spread))


def pack(samples: Int64, lengths: Int64, limits: MicroBatchLimits) -> list[Int64]:
    """First fit in order; a sample longer than the cap sits alone."""
    if limits.max_tokens is None:
        return [samples[i : i + limits.max_samples] for i in range(0, len(samples), limits.max_samples)]
    if lengths[samples].sum() <= limits.max_tokens:
        return [samples] if len(samples) else []
    bins: list[list[int]] = []
    room = FirstFit(len(samples), limits.max_tokens)
    for sample in samples.tolist():
        length = int(lengths[sample])
        number = room.place(length)
        if number == len(bins):
            bins.append([])
        bins[number].append(sample)
    return [np.asarray(b, np.int64) for b in bins]


class FirstFit:
    """Which bin an item goes into: the first with room for it, else a new one. log(bins) steps for each item.

    A tournament tree: a leaf is a bin's free room, an inner node the largest below it. Bins that were not opened yet are
    leaves with all their room, so a new bin needs no case of its own.
    """

    def __init__(self, num_items: int, room: int) -> None:
        self._room = room
        self._leaves = 1 << max(0, num_items - 1).bit_length()
        self._free = [room] * (2 * self._leaves)

    def place(self, size: int) -> int:
        """The bin's number. An item larger than a whole bin takes an empty one, and nothing joins it."""
        free = self._free
        wanted = min(size, self._room)
        node = 1
        while node < self._leaves:
            node = 2 * node if free[2 * node] >= wanted else 2 * node + 1
        number = node - self._leaves
        free[node] -= wanted
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
        return number


def divide(bins: Sequence[Int64], lengths: Int64, multiple: int) -> list[Int64]:
    """Splits the bin with most tokens in two, longest sample first into the lighter half, until the count divides."""
    result = list(bins)
    tokens = [int(lengths[b].sum()) for b in result]
    while len(result) % multiple or not result:
        heaviest = max((number for number, b in enumerate(result) if len(b) > 1), key=tokens.__getitem__, default=None)
        if heaviest is None:
            result.append(np.empty(0, np.int64))
            tokens.append(0)
            continue
        halves: tuple[list[int], list[int]] = ([], [])
        weights = [0, 0]
        members = result[heaviest]
        for sample in members[np.argsort(-lengths[members], kind="stable")].tolist():
            lighter = 0 if weights[0] <= weights[1] else 1
            halves[lighter].append(sample)
            weights[lighter] += int(lengths[sample])
        result[heaviest : heaviest + 1] = [np.sort(np.asarray(half, np.int64)) for half in halves]
        tokens[heaviest : heaviest + 1] = weights
    return result
