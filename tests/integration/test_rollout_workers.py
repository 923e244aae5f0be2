"""Runs with rollout workers: the groups of a run without them, also after a worker or the run was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

STEPS = 4
WORDS = (
    "--engine", "sglang", "--rollout-max-response-len", "40", "--rollout-batch-size", "6", "--n-samples-per-prompt", "2",
    "--num-rollout", str(STEPS), "--dump-rollouts", "--reward", "even", "--plugin", "even.py",
)  # fmt: skip
EVEN = """
from slime_core.plugin import reward

@reward("even")
def even(sample):
    return {"score": float(sample.response_tokens.sum() % 2), "length": float(sample.response_length)}
"""


@pytest.fixture
def serve() -> Iterator[Callable[[float], tuple[str, ...]]]:
    """Starts a server with these seconds for a token; returns the flags of a run that asks it."""
    started: list[subprocess.Popen[str]] = []

    def start(seconds_per_token: float = 0.0002) -> tuple[str, ...]:
        command = [sys.executable, str(Path(__file__).with_name("reproducible_server.py")), str(seconds_per_token)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return "--sglang-external-engine-addrs", f"127.0.0.1:{int(started[-1].stdout.readline())}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def prepared(tiny: TinyRun) -> TinyRun:
    (tiny / "even.py").write_text(EVEN)
    text = (tiny / "run.toml").read_text()
    (tiny / "run.toml").write_text(text.replace("[rollout]", '[rollout]\nreward_key = "score"'))
    return tiny


def groups_of(tiny: TinyRun, run: str = "tiny") -> list[list[dict[str, Any]]]:
    """The rows of the dumped groups, by step."""
    dumps = sorted((tiny.runs / run / "rollouts").glob("*.parquet"))
    return [pyarrow.parquet.read_table(path).to_pylist() for path in dumps]


def events(tiny: TinyRun, run: str = "tiny") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tiny.runs / run / "events.jsonl").read_text().splitlines()]


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes of rollout workers; spawned ones have their name nowhere but in the order of their start."""
    children = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
    return sorted(children, key=lambda child: child.create_time())


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def steps_of(tiny: TinyRun, run: str) -> int:
    path = tiny.runs / run / "metrics.jsonl"
    return path.read_text().count('"rollout/step"') if path.exists() else 0


def test_workers_make_the_groups_of_a_run_without_them(prepared: TinyRun, serve: Callable[..., tuple[str, ...]]):
    """With evaluation, by another generator's episodes in the same workers."""
    address = serve()
    evaluation = "--set", 'eval.datasets={all={path="train.jsonl",reward="even",n_samples_per_eval_prompt=3}}'
    for count in (0, 1, 3):
        words = "--name", f"with-{count}", "--rollout-workers", str(count), "--eval-interval", "2", *evaluation
        ended = prepared.run(*WORDS, *address, *words)
        assert ended.code == 0, ended.err
    plain, one, three = (groups_of(prepared, f"with-{count}") for count in (0, 1, 3))
    assert len(plain) == STEPS
    assert len({tuple(row["tokens"]) for row in plain[0]}) > 6
    assert plain == one == three
    kinds = [[event["event"] for event in events(prepared, f"with-{count}")] for count in (0, 3)]
    assert kinds[0] == kinds[1]
    evaluated = [
        [line["metrics"] for line in prepared.metrics(f"with-{count}") if line["axis"] == "eval/step"] for count in (0, 3)
    ]
    assert len(evaluated[0]) > 1
    for plain_metrics, metrics in zip(*evaluated, strict=True):
        assert {name: value for name, value in metrics.items() if name.startswith("eval/")} == {
            name: value for name, value in plain_metrics.items() if name.startswith("eval/")
        }
