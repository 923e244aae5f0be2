"""The data buffer: trajectories of 1,000 tokens through it, per minute of one core.

Every round puts groups into the real DataBuffer (half of them surplus, half partial), writes its checkpoint, reads the
checkpoint into another buffer, and takes the groups out of that one. The goal is 100,000 trajectories a minute.

    python benchmarks/buffer.py
    python benchmarks/buffer.py --profile
    python benchmarks/buffer.py --record            # on a quiet machine: appends to RESULTS.md
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import platform
import pstats
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.sample import Sample, Status, VersionSpan
from slime_plugin_kit.simulated_run import Numbers

RESULTS = Path(__file__).with_name("RESULTS.md")
TOKENS, SAMPLES, GROUPS = 1_000, 8, 250
VOCABULARY = 150_000


def make_items(numbers: Numbers, draw: np.random.Generator) -> list[BufferItem]:
    """Tokens as a vocabulary of 150,000 with a Zipf's law has them, log-probs as a policy's."""
    items = []
    for place, prompt in enumerate(numbers.take(GROUPS)):
        samples = []
        for position in range(SAMPLES):
            response = np.minimum(draw.zipf(1.2, TOKENS), VOCABULARY).astype(np.int32)
            samples.append(
                Sample(
                    index=prompt.group_index * SAMPLES + position,
                    group_index=prompt.group_index,
                    rollout_id=prompt.group_index * SAMPLES + position,
                    prompt=prompt,
                    tokens=np.concatenate([prompt.token_ids, response]),
                    prompt_length=len(prompt.token_ids),
                    loss_mask=np.ones(TOKENS, np.uint8),
                    rollout_log_probs=-draw.exponential(0.7, TOKENS).astype(np.float32),
                    response="so the response must be 42, since " * (TOKENS // 8),
                    spans=(VersionSpan(3, 0, TOKENS // 2), VersionSpan(4, TOKENS // 2, TOKENS)),
                    status=Status.ABORTED if place % 2 else Status.COMPLETED,
                    reward=None if place % 2 else float(position % 2),
                )
            )
        kind = ItemKind.PARTIAL if place % 2 else ItemKind.SURPLUS
        items.append(
            BufferItem(prompt=prompt, kind=kind, samples=tuple(samples), added_step=place, start_rollout_id=place)
        )
    return items


def measure(rounds: int, folder: Path) -> tuple[Counter[str], int]:
    """CPU seconds by what was done, and bytes of a checkpoint."""
    spent: Counter[str] = Counter()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        spent[name] += time.process_time() - began  # type: ignore[assignment]

    numbers, draw = Numbers(), np.random.default_rng(0)
    size = 0
    for _ in range(rounds):
        items = make_items(numbers, draw)
        one, other = (DataBuffer(Numbers(), PopFirstFilter()) for _ in range(2))
        with timed("put"):
            one.add_samples(items)
        with timed("save"):
            one.save(folder)
        with timed("load"):
            other.load(folder)
        taken = []
        with timed("take"):
            while len(other):
                taken += other.get_samples(32)
        size = sum(path.stat().st_size for path in folder.iterdir())
        for item, back in zip(items, taken[: len(items)], strict=True):
            for sample, same in zip(item.samples, back.samples, strict=True):
                assert np.array_equal(sample.tokens, same.tokens)
                assert np.array_equal(sample.rollout_log_probs, same.rollout_log_probs)
                assert sample.spans == same.spans
    return spent, size


def report(rounds: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        spent, size = measure(rounds, Path(folder))
    trajectories, total = rounds * GROUPS * SAMPLES, sum(spent.values())
    parts = ", ".join(f"{name} {1e6 * seconds / trajectories:.0f}" for name, seconds in spent.items())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return (
        f"{trajectories:,} trajectories of {TOKENS:,} tokens: {60 * trajectories / total:,.0f} a minute of one core "
        f"(CPU microseconds each: {parts}); {size / (GROUPS * SAMPLES * TOKENS):.1f} bytes a token on disk; at most "
        f"{peak:.2f} GiB resident.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help=f"of {GROUPS * SAMPLES:,} trajectories")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md")
    options = parser.parse_args()
    # One core: Arrow would compress and decode in all of them.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with cProfile.Profile() as profile:
        if not options.profile:
            profile.disable()
        text = report(options.rounds)
    print(text)
    if options.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(25)
    if options.record:
        with RESULTS.open("a") as results:
            results.write(
                f"\n## {datetime.date.today()}: trajectories through the data buffer\n\n"
                f"`python benchmarks/buffer.py --rounds {options.rounds}`  \nOne core; Python {platform.python_version()}, "
                f"pyarrow {version('pyarrow')}, numpy {version('numpy')}.\n\n{text}"
            )


if __name__ == "__main__":
    main()
