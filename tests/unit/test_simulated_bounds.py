"""The speedup of asynchrony and partial rollouts on a virtual clock, in the short form of benchmarks/simulated_rollout.py: at
least 0.9 of their bounds in closed form."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "simulated_rollout.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("simulated_rollout", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules["simulated_rollout"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("way", ["asynchronous", "partial"])
def test_a_step_takes_hardly_longer_than_it_must(benchmark: Any, way: str) -> None:
    """Training takes 0.3 of what generation takes by itself, most of which is waiting for the longest responses."""
    size = benchmark.Size(steps=24, groups=16, slots=64)
    alone = benchmark.step_seconds(benchmark.simulate(size, 0.0, {}, benchmark.Seen()))
    train = benchmark.TRAIN_SHARE * alone
    found = getattr(benchmark, way)(size, train)
    assert found.seconds < 0.75 * (alone + train)
    # Of so few responses the mean length is not quite that of the distribution.
    assert 0.9 < found.least / found.seconds < 1.1
    assert max(found.seen.behind) <= 8
