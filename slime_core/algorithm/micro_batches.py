"""plan_step: divides the samples of an optimizer step into micro-batches of the data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slime_core.algorithm.flops import ModelShape
from slime_core.types.batch import Float64, Int64

TRIES: Final = 16
"""Micro-batches, lightest first, that are tried for a sample."""
ITEMS_OF_A_MICRO_BATCH: Final = 4
"""Samples that share a prompt are kept together in parts of a micro-batch: with larger ones, costs would differ."""
SLACKS: Final = (1.002, 1.01, 1.03)
"""Sizes of micro-batches that first fit tries, over the mean, before the limit itself."""


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
    samples: Int64,
    lengths: Int64,
    *,
    dp_size: int,
    limits: MicroBatchLimits,
    shape: ModelShape,
    balance: bool,
    prompts: Int64 | None = None,
) -> StepPlan:
    """Distributes `samples` (positions in `lengths`, in tokens) over micro-batches, and these over the ranks.

    Ranks that gather weights or exchange tokens inside a micro-batch wait for each other, so a step takes as long as the
    costliest m-th micro-batch of any rank, summed over m. With `balance`, the costs (forward FLOPs) of the m-th micro-batches
    are nearly equal, and so are the ranks' sums. Without, samples are packed by first fit in order, and dealt in turn.

    Every sample is placed once. All ranks have equally many micro-batches, the fewest that hold the samples; some are empty if
    there are not enough samples. `prompts`, (len(lengths),): neighbours with equal numbers share a prompt, and are placed
    together in parts of a micro-batch.
    """
    multiple = dp_size * limits.multiple
    if not balance:
        bins = divide(pack(samples, lengths, limits), lengths, multiple)
        return StepPlan(ranks=tuple(tuple(bins[rank::dp_size]) for rank in range(dp_size)))
    costs = shape.forward_flops(lengths)
    bins = level(samples, lengths, costs, limits, multiple, prompts)
    return StepPlan(ranks=deal(bins, [float(costs[b].sum()) for b in bins], dp_size))


def deal(bins: Sequence[Int64], costs: Sequence[float], dp_size: int) -> tuple[tuple[Int64, ...], ...]:
    """Costliest first, `dp_size` at a time; of these the costliest goes to the rank with the smallest sum so far. Each rank's
    costliest are then in the middle: a pipeline fills and drains with cheap ones."""
    ranks: list[list[Int64]] = [[] for _ in range(dp_size)]
    sums = np.zeros(dp_size)
    order = np.argsort(-np.asarray(costs, np.float64), kind="stable")
    for turn in order.reshape(-1, dp_size):
        for rank, number in zip(np.argsort(sums, kind="stable").tolist(), turn.tolist(), strict=True):
            ranks[rank].append(bins[number])
            sums[rank] += costs[number]
    return tuple((*rank[::2][::-1], *rank[1::2]) for rank in ranks)


def level(
    samples: Int64, lengths: Int64, costs: Float64, limits: MicroBatchLimits, multiple: int, prompts: Int64 | None
) -> list[Int64]:
    """Micro-batches of nearly equal cost, as few as a multiple of `multiple` allows."""
    if not len(samples):
        return divide([], lengths, multiple)
    by_tokens = limits.max_tokens is not None
    room = limits.max_tokens if limits.max_tokens is not None else limits.max_samples
    sizes = lengths[samples] if by_tokens else np.ones(len(samples), np.int64)
    total = int(np.minimum(sizes, room).sum())
    count = max(1, -(-total // (room * multiple))) * multiple
    starts = np.arange(len(samples))
    if prompts is not None:
        together = parts_of_prompts(prompts[samples], sizes, total // (count * ITEMS_OF_A_MICRO_BATCH))
        starts = together if len(together) >= count else starts
    sizes, item_costs = np.add.reduceat(sizes, starts), np.add.reduceat(costs[samples], starts)
    order = np.argsort(-item_costs, kind="stable")
    items = np.split(samples, starts[1:])
    while True:
        placed = lightest_first(order, sizes, item_costs, count, room) or first_fit(order, sizes, count, room)
        if len(placed) <= count:
            bins = [np.sort(np.concatenate([np.empty(0, np.int64), *(items[i] for i in one)])) for one in placed]
            return divide(bins, lengths, multiple)
        count = -(-len(placed) // multiple) * multiple


def parts_of_prompts(prompts: Int64, sizes: Int64, most: int) -> Int64:
    """First sample of each part: neighbours with one prompt, of `most` tokens together at most."""
    starts, size = [0], 0
    before = None
    for number, (prompt, own) in enumerate(zip(prompts.tolist(), sizes.tolist(), strict=True)):
        if number and (prompt != before or size + own > most):
            starts.append(number)
            size = 0
        size += own
        before = prompt
    return np.asarray(starts, np.int64)


def lightest_first(order: Int64, sizes: Int64, costs: Float64, count: int, room: int) -> list[list[int]] | None:
    """Each item, costliest first, goes into the one with the smallest cost so far that has room. None: there is none among
    the lightest few. (Graham's longest processing time rule, 1969, with a capacity.)"""
    bins: list[list[int]] = [[] for _ in range(count)]
    left = [room] * count
    lightest = [(0.0, number) for number in range(count)]
    for item, size, cost in zip(order.tolist(), sizes[order].tolist(), costs[order].tolist(), strict=True):
        full: list[tuple[float, int]] = []
        while lightest and len(full) < TRIES:
            so_far, number = heapq.heappop(lightest)
            if size <= left[number] or not bins[number]:
                break
            full.append((so_far, number))
        else:
            return None
        bins[number].append(item)
        left[number] -= size
        heapq.heappush(lightest, (so_far + cost, number))
        for entry in full:
            heapq.heappush(lightest, entry)
    return bins


def first_fit(order: Int64, sizes: Int64, count: int, room: int) -> list[list[int]]:
    """First fit, costliest first, into as even sizes as `count` of them allow, or into more than `count` if it takes more.
    (Coffman, Garey and Johnson, An Application of Bin-Packing to Multiprocessor Scheduling, 1978.)"""
    longest = min(room, int(sizes.max(initial=0)))
    mean = int(np.minimum(sizes, room).sum()) / count
    limits = sorted({min(room, max(longest, int(mean * slack))) for slack in SLACKS} | {room})
    ordered = list(zip(order.tolist(), sizes[order].tolist(), strict=True))
    bins: list[list[int]] = []
    for limit in limits:
        bins, space = [], FirstFit(len(ordered), limit)
        for item, size in ordered:
            number = space.place(size)
            if number == len(bins):
                bins.append([])
            bins[number].append(item)
        if len(bins) <= count:
            break
    return bins


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
