"""Plans: which samples form which micro-batch, on which data-parallel rank, in which optimiser step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_core.batch.balance import karmarkar_karp
from slime_core.batch.flops import ModelShape
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
    bins: list[list[int]] = []
    free: list[int] = []
    first_open = 0
    for sample in samples.tolist():
        length = int(lengths[sample])
        for number in range(first_open, len(bins)):
            if free[number] >= length:
                break
        else:
            number = len(bins)
            bins.append([])
            free.append(limits.max_tokens)
        bins[number].append(sample)
        free[number] -= length
        while first_open < len(bins) and free[first_open] <= 0:
            first_open += 1
    return [np.asarray(b, np.int64) for b in bins]


def divide(bins: Sequence[Int64], lengths: Int64, multiple: int) -> list[Int64]:
    """Splits the bin with most tokens in two, longest sample first into the lighter half, until the count divides."""
    result = list(bins)
    while len(result) % multiple or not result:
        splittable = [number for number, b in enumerate(result) if len(b) > 1]
        if not splittable:
            result.append(np.empty(0, np.int64))
            continue
        heaviest = max(splittable, key=lambda number: int(lengths[result[number]].sum()))
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        members = result[heaviest]
        for sample in members[np.argsort(-lengths[members], kind="stable")].tolist():
            lighter = 0 if tokens[0] <= tokens[1] else 1
            halves[lighter].append(sample)
            tokens[lighter] += int(lengths[sample])
        result[heaviest : heaviest + 1] = [np.sort(np.asarray(half, np.int64)) for half in halves]
    return result
