"""SIMULATED: speedup by asynchrony and partial rollouts, with engines and trainers that only take time.

The loop, the session, the collectors, the buffer, the client and the checkpoints are the real ones; the engine follows a script
on a virtual clock, so hours pass in seconds and no hardware is measured. 512 responses a step (64 prompts x 8) on
256 slots; lengths log-normal, median 4,000 tokens, sigma 0.9, capped at 32,000; a slot writes 120 / (1 + n/256) tokens per
second when n slots are taken; prefill and weight updates are free; training takes 0.3 of what synchronous generation takes.

Bounds in closed form, with G = seconds of synchronous generation, T = 0.3 G, and F = 512 E[length] / (256 rate(256)), the
seconds for a step's tokens if all slots are always taken:

    asynchronous over synchronous        (G + T) / max(F, T)
    partial rollouts over none           (G + T) / (F + T)

A second part keeps 10,000 requests in flight in one driver and measures its memory (real, not simulated).

    python benchmarks/simulated_rollout.py
    python benchmarks/simulated_rollout.py --record            # appends to RESULTS.md
"""

from __future__ import annotations

import argparse
import datetime
import functools
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import xxhash

from slime_core.controller.loop import run_loop
from slime_core.types.completion import GenerateRequest
from slime_core.types.sample import SampleGroup
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.simulated_run import Simulation
from slime_plugin_kit.timed_engine import TimedEngine

RESULTS = Path(__file__).with_name("RESULTS.md")
MEDIAN, SIGMA, CAP = 4_000, 0.9, 32_000
GROUPS, SAMPLES, SLOTS = 64, 8, 256
TRAIN_SHARE = 0.3
SETTLED = 6
"""Steps at either end that are left out of a mean: the first have no others before them, the last none after them."""
IN_FLIGHT = 10_000


def rate(running: int) -> float:
    """Tokens per second of one slot when so many are taken."""
    return 120.0 / (1.0 + running / 256.0)


@functools.cache
def whole_length(index: int) -> int:
    """Tokens of a response, by its number in the run: the same however it comes about."""
    uniform = (xxhash.xxh3_64_intdigest(f"length {index}".encode()) + 0.5) / 2**64
    return max(1, min(CAP, round(MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf(uniform)))))


def length_left(request: GenerateRequest) -> int:
    written = len(request.token_ids) - 1
    return whole_length(int(request.request_id.split("/")[1])) - written


def mean_length() -> float:
    """E[min(X, cap)] of the log-normal X."""
    normal, mu = NormalDist(), math.log(MEDIAN)
    cap = (math.log(CAP) - mu) / SIGMA
    below = math.exp(mu + SIGMA**2 / 2) * normal.cdf(cap - SIGMA)
    return below + CAP * (1 - normal.cdf(cap))


@dataclass(slots=True)
class Seen:
    """Counts over the trained steps."""

    behind: list[int] = field(default_factory=list)
    """Staleness of each response, in versions."""
    tokens: int = 0

    def __call__(self, version: int, groups: Sequence[SampleGroup]) -> None:
        for group in groups:
            for sample in group.samples:
                self.behind.append(version - sample.oldest_version(version))
                self.tokens += sample.response_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a simulation."""

    steps: int
    groups: int = GROUPS
    slots: int = SLOTS


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to run."""

    least: float | None
    """The closed-form bound on the seconds of a step."""
    seconds: float
    seen: Seen


def simulate(size: Size, train_s: float, rollout: dict[str, Any], seen: Seen) -> Simulation:
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(
            engines=[TimedEngine(slots=size.slots, rate=rate, length=length_left)],
            folder=Path(folder),
            num_rollout=size.steps,
            rollout={
                "rollout_batch_size": size.groups,
                "n_samples_per_prompt": SAMPLES,
                "rollout_max_response_len": CAP,
                **rollout,
            },
            train_s=train_s,
            observe=seen,
        )
        run_fast(run_loop(simulation.session()), patience_s=1e9)
    return simulation


def step_seconds(simulation: Simulation) -> float:
    """Mean over the steps in the middle."""
    times = simulation.trained_at[SETTLED:-SETTLED]
    return (times[-1] - times[0]) / (len(times) - 1)


def full_seconds(size: Size) -> float:
    return size.groups * SAMPLES * mean_length() / (size.slots * rate(size.slots))


def asynchronous(size: Size, train: float) -> Measured:
    seen = Seen()
    seconds = step_seconds(simulate(size, train, {"max_async_level": 3, "max_staleness": 8}, seen))
    return Measured(max(full_seconds(size), train), seconds, seen)


def partial(size: Size, train: float) -> Measured:
    seen = Seen()
    rollout = {"partial_rollout": True, "over_sampling_batch_size": 2 * size.groups, "max_staleness": 8}
    return Measured(full_seconds(size) + train, step_seconds(simulate(size, train, rollout, seen)), seen)


def one_ahead(size: Size, train: float) -> Measured:
    seen = Seen()
    return Measured(None, step_seconds(simulate(size, train, {"max_async_level": 1}, seen)), seen)


def compare(steps: int) -> list[str]:
    size = Size(steps=steps)
    full = full_seconds(size)
    generation = step_seconds(simulate(size, 0.0, {}, Seen()))
    train = TRAIN_SHARE * generation
    sync = step_seconds(simulate(size, train, {}, Seen()))
    cases = {
        "one step ahead (`--max-async-level 1`)": one_ahead,
        "asynchronous (`--max-async-level 3 --max-staleness 8`)": asynchronous,
        "partial rollouts (`--partial-rollout --over-sampling-batch-size 128 --max-staleness 8`)": partial,
    }
    lines = [
        f"E[length] {mean_length():,.0f} tokens; F = {full:.0f} s, G = {generation:.0f} s, T = {train:.0f} s; "
        f"{steps} steps, the first and last {SETTLED} left out.",
        "",
        "| simulated | s per step | speed-up | bound | of the bound | staleness mean (max) |",
        "|---|---:|---:|---:|---:|---:|",
        f"| synchronous | {sync:.0f} | 1.00 | | | 0 (0) |",
    ]
    for name, measure in cases.items():
        found = measure(size, train)
        behind, least = found.seen.behind, found.least
        mean, most = sum(behind) / len(behind), max(behind)
        reached = "| | " if least is None else f"| {sync / least:.2f} | {least / found.seconds:.2f} "
        lines.append(f"| {name} | {found.seconds:.0f} | {sync / found.seconds:.2f} {reached}| {mean:.2f} ({most}) |")
    return lines


def many_in_flight() -> str:
    """In a process of its own: the memory of a driver with so many requests in flight."""
    groups, seen = IN_FLIGHT // SAMPLES, Seen()
    began = time.process_time()
    size = Size(steps=1, groups=groups, slots=IN_FLIGHT)
    simulation = simulate(size, 1.0, {"concurrency": IN_FLIGHT}, seen)
    most, seconds = simulation.engines[0].most_running, time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert most == IN_FLIGHT
    return (
        f"{most:,} requests in flight at once in one driver, which then holds all their responses "
        f"({seen.tokens / 1e6:.0f} million tokens): at most {peak:.2f} GiB resident, {seconds:.1f} CPU seconds."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    parser.add_argument("--many-in-flight", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.many_in_flight:
        print(many_in_flight())
        return
    command = [sys.executable, __file__, "--many-in-flight"]
    memory = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = compare(options.steps)
    text = "\n".join([*lines, "", memory])
    print(text)
    if options.record:
        title = f"## {datetime.date.today()}: rollouts SIMULATED on a virtual clock (no hardware is measured)"
        with RESULTS.open("a") as results:
            results.write(f"\n{title}\n\n`python benchmarks/simulated_rollout.py --steps {options.steps}`\n\n{text}")


if __name__ == "__main__":
    main()
