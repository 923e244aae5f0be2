"""Generators in a run: built and opened once for equal options, what they count is logged, and they are closed at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

COUNTING = """
from pathlib import Path

from slime_core.contracts.generator import Generator
from slime_core.plugin import generator

LOG = Path("generators.log")


def log(line):
    with LOG.open("a") as file:
        file.write(line + "\\n")


@generator("counting")
class Counting(Generator):
    def __init__(self):
        log("built")

    async def open(self):
        log("opened")

    async def generate(self, episode):
        trajectory = episode.trajectory()
        trajectory.append_completion(await episode.complete(trajectory.tokens))
        trajectory.counts["calls"] += 1
        trajectory.counts["long"] += len(trajectory.last_turn) == 4
        return [trajectory.finish()]

    async def close(self):
        log("closed")
"""


@pytest.mark.usefixtures("tiny_forks")
def test_a_generator_of_a_plugin_file(tiny: TinyRun) -> None:
    (tiny / "counting.py").write_text(COUNTING)
    sets = ("--eval-prompt-data", "one", "train.jsonl", "two", "train.jsonl@[0:3]")
    ended = tiny.run("--plugin", "counting.py", "--generate", "counting", "--num-rollout", "1", *sets)
    assert ended.code == 0, ended.err
    # Training and two evaluation sets.
    assert (tiny / "generators.log").read_text().split() == ["built", "opened", "closed"]
    metrics = {name: value for record in tiny.metrics() for name, value in record["metrics"].items()}
    assert metrics["rollout/count/calls"] == metrics["eval/one/count/calls"] == metrics["eval/two/count/calls"] == 1.0
    assert 0.0 < metrics["eval/one/count/long"] <= 1.0
