"""plan_step: divides the samples of an optimizer step into micro-batches of the data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slime_core.algorithm.flops import ModelShape
from slime_core.types.batch import Float64, Int64

TRIES: Final = 64
"""Micro-batches, those with most work left first, that are tried for a sample."""
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
    if not balance:
        bins = divide(pack(samples, lengths, limits), lengths, dp_size * limits.multiple)
        return StepPlan(ranks=tuple(tuple(bins[rank::dp_size]) for rank in range(dp_size)))
    costs = shape.forward_flops(lengths)
    bins = level(samples, lengths, costs, limits, dp_size, prompts)
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
    samples: Int64, lengths: Int64, costs: Float64, limits: MicroBatchLimits, dp_size: int, prompts: Int64 | None
) -> list[Int64]:
    """Micro-batches of nearly equal cost in rounds of `dp_size`, as few as the limits allow."""
    multiple = dp_size * limits.multiple
    if not len(samples):
        return divide([], lengths, multiple)
    room = limits.max_tokens if limits.max_tokens is not None else limits.max_samples
    sizes = np.ones(len(samples), np.int64) if limits.max_tokens is None else lengths[samples]
    total = int(np.minimum(sizes, room).sum())
    fewest = max(1, -(-total // room), int(np.count_nonzero(2 * sizes > room)))
    count = -(-fewest // multiple) * multiple
    starts = np.arange(len(samples))
    if prompts is not None:
        together = parts_of_prompts(prompts[samples], sizes, total // (count * ITEMS_OF_A_MICRO_BATCH))
        starts = together if len(together) >= count else starts
    sizes, costs = np.add.reduceat(sizes, starts), np.add.reduceat(costs[samples], starts)
    order = np.argsort(-costs, kind="stable")
    items = np.split(samples, starts[1:])
    while True:
        placed = most_left_first(order, sizes, costs, count, dp_size, room) or even_first_fit(order, sizes, count, room)
        if len(placed) <= count:
            bins = [np.sort(np.concatenate([items[i] for i in one])) for one in placed if one]
            return divide(bins, lengths, multiple)
        count = -(-len(placed) // multiple) * multiple


def parts_of_prompts(prompts: Int64, sizes: Int64, most: int) -> Int64:
    """First sample of each part: neighbours with one prompt, of `most` tokens together at most."""
    starts, size = [0], 0
    for number, own in enumerate(sizes.tolist()):
        if number and (prompts[number] != prompts[number - 1] or size + own > most):
            starts.append(number)
            size = 0
        size += own
    return np.asarray(starts, np.int64)


def levels(sizes: Int64, costs: Float64, price: float, total: float, count: int, dp_size: int, room: int) -> Float64:
    """(count,): costs to add to micro-batches, so that the sum over rounds of `dp_size` of a round's costliest is smallest.

    sizes, costs: of the items over half of `room`, costliest first; no two fit together, so each begins a micro-batch. The
    others are thought of as a fluid of `price` a token, all items together cost `total`. A round's micro-batches rise to one
    level, or stop where they are full. They rise where most of a round are not full; of equal rounds, the lowest first.
    """
    own, used = np.zeros(count), np.zeros(count)
    own[: len(costs)], used[: len(sizes)] = costs, sizes
    full = (own + price * np.maximum(0, room - used)).reshape(-1, dp_size)
    first = own.reshape(-1, dp_size)[:, :1]
    tops = np.hstack([first, np.maximum(first, np.sort(full, axis=1))])
    needed = total - np.array([np.minimum(full, top[:, None]).sum() for top in tops.T])
    done = max(1, min(int(np.count_nonzero(needed >= 0)), dp_size)) - 1
    low, high = tops[:, done], tops[:, done + 1]
    steps = np.sort(np.hstack([low, high]))
    risen = [(np.clip(step, low, high) - low).sum() for step in steps]
    reached = np.clip(np.interp(needed[done] / (dp_size - done), risen, steps), low, high)
    return np.asarray(np.minimum(full, reached[:, None]).ravel() - own, np.float64)


def most_left_first(order: Int64, sizes: Int64, costs: Float64, count: int, dp_size: int, room: int) -> list[list[int]]:
    """Each item, costliest first, goes into the one farthest below its level that has room. Empty: there is none among the
    farthest few. (Graham's longest processing time rule, 1969, with a capacity and a level for each.)"""
    over_half = 2 * sizes[order] > room
    large, others = order[over_half], order[~over_half]
    bins = [[item] for item in large.tolist()] + [[] for _ in range(count - len(large))]
    left = (room - sizes[large]).tolist() + [room] * (count - len(large))
    price = float(costs[others].sum()) / max(1, int(sizes[others].sum()))
    gaps = levels(sizes[large], costs[large], price, float(costs.sum()), count, dp_size, room)
    farthest = sorted((-gap, number) for number, gap in enumerate(gaps.tolist()))
    for item, size, cost in zip(others.tolist(), sizes[others].tolist(), costs[others].tolist(), strict=True):
        full: list[tuple[float, int]] = []
        while farthest and len(full) < TRIES:
            below, number = heapq.heappop(farthest)
            if size <= left[number]:
                break
            full.append((below, number))
        else:
            return []
        bins[number].append(item)
        left[number] -= size
        for entry in (*full, (below + cost, number)):
            heapq.heappush(farthest, entry)
    return bins


def even_first_fit(order: Int64, sizes: Int64, count: int, room: int) -> list[list[int]]:
    """First fit, costliest first, into as even sizes as `count` of them allow, or into more than `count` if it takes more.
    (Coffman, Garey and Johnson, An Application of Bin-Packing to Multiprocessor Scheduling, 1978.)"""
    longest = min(room, int(sizes.max(initial=0)))
    mean = int(np.minimum(sizes, room).sum()) / count
    for limit in sorted({min(room, max(longest, int(mean * slack))) for slack in SLACKS} | {room}):
        bins = first_fit(order, sizes, limit)
        if len(bins) <= count:
            break
    return bins


def pack(samples: Int64, lengths: Int64, limits: MicroBatchLimits) -> list[Int64]:
    """First fit in order; a sample longer than the limit gets its own micro-batch."""
    if limits.max_tokens is None:
        return [samples[i : i + limits.max_samples] for i in range(0, len(samples), limits.max_samples)]
    return [np.asarray(one, np.int64) for one in first_fit(samples, lengths, limits.max_tokens)]


def first_fit(items: Int64, sizes: Int64, room: int) -> list[list[int]]:
    """Puts each item in the first bin with room for it, else in a new one, in O(log(bins)). One larger than a bin is alone.

    A tournament tree: a leaf is a bin's free room, an inner node the largest below it. Unused bins are leaves with
    all their room, so a new bin needs no special case.
    """
    bins: list[list[int]] = []
    leaves = 1 << max(0, len(items) - 1).bit_length()
    free = [room] * (2 * leaves)
    for item, size in zip(items.tolist(), np.minimum(sizes[items], room).tolist(), strict=True):
        node = 1
        while node < leaves:
            node = 2 * node if free[2 * node] >= size else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


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
