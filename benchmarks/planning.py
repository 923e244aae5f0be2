"""How much longer a step takes than the work in it, by the way in which samples are divided into micro-batches.

    python benchmarks/planning.py [--samples 2048 16384] [--ranks 8 64] [--max-tokens 16384 32768] [--stages 4]

Counts forward FLOPs; nothing is trained. A row has one law of lengths, and for each method

- FSDP2: ranks gather weights inside a micro-batch, so they wait for each other in every one: the sum over m of the costliest
  m-th micro-batch, over the bound max(all work / ranks, longest sample), of Qwen3-4B's shape;
- PP: a one-forward-one-backward schedule of `--stages` stages per rank, the slowest rank over the bound and its unavoidable
  bubble (stages - 1) / micro-batches, of the same shape;
- EP: ranks exchange tokens inside a micro-batch, so they wait as with FSDP2, of Qwen3-30B-A3B's shape, in which attention is
  a larger share of a long sample's cost; experts are thought of as equally loaded;
- fill: the fewest micro-batches that can hold the samples, as a multiple of the ranks, over those that are used. Fewest by
  tokens, and by samples over half the limit, no two of which fit together (Martello and Toth's bound L2 of bin packing);
- CPU time to plan.

Methods: `slime-core` is this project's. `upstream` is slime at 624b824: first fit in order, the heaviest micro-batches split
until their number is a multiple of the ranks, Karmarkar-Karp over ranks by FLOPs with equal counts (as this project's 0.2).
`verl`: Karmarkar-Karp over ranks by FLOPs with equal counts, ceil(tokens / limit) micro-batches on the fullest rank,
Karmarkar-Karp by FLOPs into these, costly ones in the middle; these may exceed the limit of tokens: `over` is the largest
over the limit.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.micro_batches import MicroBatchLimits, divide, pack, plan_step

Lengths: TypeAlias = npt.NDArray[np.int64]
Costs: TypeAlias = npt.NDArray[np.float64]
Plan: TypeAlias = Sequence[Sequence[Lengths]]
"""Samples by rank and micro-batch."""

QWEN3_4B: Final = ModelShape(
    num_layers=36, hidden=2560, num_heads=32, num_kv_heads=8, head_dim=128, ffn=9728, vocab=151936
)
QWEN3_30B_A3B: Final = ModelShape(
    num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, ffn=8 * 768, vocab=151936
)
LONGEST: Final = 16384
LAWS: Final[dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.generic]]]] = {
    "log-normal(ln 2000, 1), 32 to 16k": lambda draw, count: np.clip(
        draw.lognormal(np.log(2000), 1.0, count), 32, LONGEST
    ),
    "uniform 100 to 8k": lambda draw, count: draw.integers(100, 8192, count),
    "80% 200 to 1.5k, 20% 8k to 16k": lambda draw, count: np.where(
        draw.random(count) < 0.8, draw.integers(200, 1500, count), draw.integers(8000, LONGEST, count)
    ),
}


def karmarkar_karp(weights: Costs, num_bins: int, *, equal_counts: bool) -> list[list[int]]:
    """The largest differencing method, as both peers use it: item numbers by bin."""
    order = np.argsort(-weights, kind="stable").tolist()
    size = num_bins if equal_counts else 1
    heap = []
    for start in range(0, len(order), size):
        bins = [(float(weights[item]), [item]) for item in order[start : start + size]]
        bins += [(0.0, [])] * (num_bins - len(bins))
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], start, bins))
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(items) for _, items in heap[0][2]]


def of_this_project(lengths: Lengths, shape: ModelShape, ranks: int, limit: int) -> Plan:
    return plan_step(
        np.arange(len(lengths)),
        lengths,
        dp_size=ranks,
        limits=MicroBatchLimits(max_tokens=limit),
        shape=shape,
        balance=True,
    ).ranks


def of_upstream(lengths: Lengths, shape: ModelShape, ranks: int, limit: int) -> Plan:
    bins = divide(pack(np.arange(len(lengths)), lengths, MicroBatchLimits(max_tokens=limit)), lengths, ranks)
    costs = shape.forward_flops(lengths)
    weights = np.asarray([costs[micro].sum() for micro in bins])
    return [[bins[number] for number in numbers] for numbers in karmarkar_karp(weights, ranks, equal_counts=True)]


def of_verl(lengths: Lengths, shape: ModelShape, ranks: int, limit: int) -> Plan:
    costs = shape.forward_flops(lengths)
    shares = [np.asarray(share) for share in karmarkar_karp(costs, ranks, equal_counts=True)]
    count = max(math.ceil(int(lengths[share].sum()) / limit) for share in shares)
    plan = []
    for share in shares:
        micros = [
            share[np.asarray(micro, np.int64)] for micro in karmarkar_karp(costs[share], count, equal_counts=False)
        ]
        micros.sort(key=lambda micro: -costs[micro].sum())
        plan.append([*micros[::2][::-1], *micros[1::2]])
    return plan


METHODS: Final = {"slime-core": of_this_project, "upstream": of_upstream, "verl": of_verl}


def pipeline(costs: Sequence[float], stages: int) -> float:
    """Time of one-forward-one-backward, in forward FLOPs of one stage's device; a backward takes twice a forward."""
    count = len(costs)
    work = [
        [*((True, m) for m in range(min(stages - stage, count)))]
        + [
            step
            for m in range(count)
            for step in ((False, m), *(((True, m + stages - stage),) if m + stages - stage < count else ()))
        ]
        for stage in range(stages)
    ]
    ended: dict[tuple[bool, int, int], float] = {}
    clock, places = [0.0] * stages, [0] * stages
    while any(place < len(todo) for place, todo in zip(places, work, strict=True)):
        for stage in range(stages):
            while places[stage] < len(work[stage]):
                forward, m = work[stage][places[stage]]
                before = (forward, m, stage - 1 if forward else stage + 1)
                if 0 <= before[2] < stages and before not in ended:
                    break
                start = max(clock[stage], ended.get(before, 0.0))
                clock[stage] = ended[forward, m, stage] = start + costs[m] / stages * (1 if forward else 2)
                places[stage] += 1
    return max(clock) / 3


def fewest(lengths: Lengths, ranks: int, limit: int) -> int:
    """Micro-batches of a rank that any method needs, by the bound L2 of Martello and Toth (1990)."""
    most = 0
    for small in np.unique(lengths[2 * lengths <= limit]).tolist() or [0]:
        alone = lengths > limit - small
        halves = (2 * lengths > limit) & ~alone
        others = lengths[(2 * lengths <= limit) & (lengths >= small)].sum() - (limit - lengths[halves]).sum()
        most = max(most, int(alone.sum() + halves.sum()) + max(0, math.ceil(int(others) / limit)))
    return math.ceil(most / ranks)


def together(plan: Plan, costs: Costs, bound: float) -> float:
    by_rank = np.array([[costs[micro].sum() for micro in micros] for micros in plan])
    return float(by_rank.max(axis=0).sum()) / bound - 1


def in_pipeline(plan: Plan, costs: Costs, bound: float, stages: int) -> float:
    slowest = max(pipeline([float(costs[micro].sum()) for micro in micros], stages) for micros in plan)
    return slowest * stages / (bound * (1 + (stages - 1) / len(plan[0]))) - 1


def row(law: str, lengths: Lengths, ranks: int, limit: int, stages: int) -> list[str]:
    dense, experts = (shape.forward_flops(lengths) for shape in (QWEN3_4B, QWEN3_30B_A3B))
    of_dense, of_experts = (max(float(costs.sum()) / ranks, float(costs.max())) for costs in (dense, experts))
    needed = fewest(lengths, ranks, limit)
    cells = [law, f"{len(lengths):,}", str(ranks), f"{limit:,}"]
    for method in METHODS.values():
        begun = time.process_time()
        plan = method(lengths, QWEN3_4B, ranks, limit)
        seconds = time.process_time() - begun
        over = max(int(lengths[micro].sum()) for micros in plan for micro in micros) / limit - 1
        figures = [
            together(plan, dense, of_dense),
            in_pipeline(plan, dense, of_dense, stages),
            together(method(lengths, QWEN3_30B_A3B, ranks, limit), experts, of_experts),
        ]
        note = f", over {over:.0%}" if over > 0 else ""
        waits = ", ".join(f"{figure:+.1%}" for figure in figures)
        cells.append(f"{waits}, {min(1.0, needed / len(plan[0])):.3f}{note}, {seconds:.2f} s")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    typed = parser.parse_args()
    for name in set(METHODS) - set(typed.methods):
        del METHODS[name]
    print(f"Each cell: FSDP2, PP {typed.stages}, EP, fill, CPU time to plan.\n")
    head = ["lengths", "samples", "ranks", "limit", *METHODS]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for limit in typed.max_tokens:
        for count in typed.samples:
            for ranks in typed.ranks:
                for law, drawn in LAWS.items():
                    lengths = drawn(np.random.default_rng(0), count).astype(np.int64)
                    print("| " + " | ".join(row(law, lengths, ranks, limit, typed.stages)) + " |", flush=True)


if __name__ == "__main__":
    main()
