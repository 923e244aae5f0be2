"""plan_step: divides the samples of an optimizer step into micro-batches of the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_core.algorithm.balance import karmarkar_karp
from slime_core.algorithm.flops import ModelShape
from slime_core.types.batch import Int64


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """Size limits of micro-batches."""

    max_tokens: int | None
    """Tokens of a packed micro-batch over all context-parallel ranks; None: `max_samples` samples each."""
    max_samples: int = 1
    multiple: int = 1
    """The number of micro-batches per rank must be a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """`ranks[r][m]`: samples of micro-batch m on data-parallel rank r, perhaps none; all ranks have equally many."""

    ranks: tuple[tuple[Int64, ...], ...]

    def samples_of(self, rank: int) -> Int64:
        return np.concatenate([np.empty(0, np.int64), *self.ranks[rank]])


def plan_step(
    samples: Int64, lengths: Int64, *, dp_size: int, limits: MicroBatchLimits, shape: ModelShape, balance: bool
) -> StepPlan:
    """Packs `samples` (positions in `lengths`, in tokens) and distributes the micro-batches over the ranks.

    Every sample is placed exactly once. For equal counts per rank, bins are split, heaviest first, until their number is a
    multiple; if no bin can be split, empty ones are added.
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
    """First fit in order; a sample longer than the limit gets its own micro-batch."""
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
    """Places each item in the first bin with room for it, else in a new one, in O(log(bins)).

    A tournament tree: a leaf is a bin's free room, an inner node the largest below it. Unused bins are leaves with
    all their room, so a new bin needs no special case.
    """

    def __init__(self, num_items: int, room: int) -> None:
        self._room = room
        self._leaves = 1 << max(0, num_items - 1).bit_length()
        self._free = [room] * (2 * self._leaves)

    def place(self, size: int) -> int:
        """Returns the bin's number. An item larger than a bin gets an empty one for itself."""
        free = self._free
        requested = min(size, self._room)
        node = 1
        while node < self._leaves:
            node = 2 * node if free[2 * node] >= requested else 2 * node + 1
        number = node - self._leaves
        free[node] -= requested
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
        return number


def divide(bins: Sequence[Int64], lengths: Int64, multiple: int) -> list[Int64]:
    """Splits the bin with most tokens in two, longest sample first into the lighter half, until their number is a multiple."""
    result = list(bins)
    tokens = [int(lengths[b].sum()) for b in result]
    while len(result) % multiple or not result:
        heaviest = max((number for number, b in enumerate(result) if len(b) > 1), key=tokens.__getitem__, default=None)
        if heaviest is None:
            result.append(np.empty(0, np.int64))
            tokens.append(0)
            continue
        parts = halves(result[heaviest], lengths)
        result[heaviest : heaviest + 1] = parts
        tokens[heaviest : heaviest + 1] = [int(lengths[part].sum()) for part in parts]
    return result


def halves(samples: Int64, lengths: Int64) -> list[Int64]:
    """Two or more samples in two micro-batches of about equally many tokens: longest first, into the lighter one."""
    parts: tuple[list[int], list[int]] = ([], [])
    weights = [0, 0]
    for sample in samples[np.argsort(-lengths[samples], kind="stable")].tolist():
        lighter = 0 if weights[0] <= weights[1] else 1
        parts[lighter].append(sample)
        weights[lighter] += int(lengths[sample])
    return [np.sort(np.asarray(part, np.int64)) for part in parts]
