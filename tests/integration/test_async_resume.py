"""An asynchronous run with partial rollouts that is killed with SIGKILL: no prompt is lost and none is trained twice. Its
recorded schedule repeats it to the bit."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = pytest.mark.faults

STEPS, GROUPS, SAMPLES, STALENESS = 12, 2, 2, 6
WORDS = (
    "--ahead", "2", "--partial-rollout", "--over-sampling-batch-size", "4", "--max-staleness", str(STALENESS),
    "--rollout-max-response-len", "24", "--num-rollout", str(STEPS), "--save-interval", "2", "--dump-rollouts", "--save-hf",
)  # fmt: skip
KILLED_AFTER = (5,)
"""Steps in the record; then a while that the draw decides."""


def steps_done(tiny: TinyRun) -> int:
    try:
        return len(tiny.steps())
    except (FileNotFoundError, ValueError):
        # Not there yet, or in the middle of a line.
        return 0


def kill_after(tiny: TinyRun, steps: int, pause_s: float) -> None:
    process = tiny.start("run", "run.toml", *WORDS)
    while steps_done(tiny) < steps:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(pause_s)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said


def test_killed_while_weights_and_rollouts_are_in_flight(tiny: TinyRun) -> None:
    draw = random.Random(20261121)
    for steps in KILLED_AFTER:
        kill_after(tiny, steps, draw.uniform(0, 0.1))
    ended = tiny.run(*WORDS)
    assert (ended.code, ended.err) == (0, ""), ended.err
    run = tiny.runs / "tiny"
    assert json.loads((run / "attempts").read_text()) == len(KILLED_AFTER) + 1
    assert tiny.steps() == list(range(STEPS))

    trained: Counter[int] = Counter()
    answers: Counter[int] = Counter()
    several_versions = 0
    for step in range(STEPS):
        rows = pyarrow.parquet.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        trained.update({row["group_index"] for row in rows})
        for row in rows:
            answers[row["index"]] += 1
            require_covered(row, step)
            several_versions += len(row["spans"]) > 1
        assert len(rows) == GROUPS * SAMPLES
    assert set(answers.values()) == {1}, "an answer is trained twice"
    assert several_versions, "no answer went on under new weights: the test shows nothing"

    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    state = json.loads((last / "buffer/buffer.json").read_text())
    waiting = {row["group_index"] for row in pyarrow.parquet.read_table(last / "buffer/buffer.parquet").to_pylist()}
    assert not waiting & set(trained)
    drawn = state["source"]["next_group_index"]
    assert set(trained) | waiting == set(range(drawn)), "a prompt is lost"

    ended = tiny.run(*WORDS, "--replay-schedule", str(run / "schedule.jsonl"))
    assert (ended.code, ended.err) == (0, ""), ended.err
    again = tiny.runs / "tiny-2"
    assert figures(tiny, "tiny-2") == figures(tiny, "tiny")
    assert (again / "hf/model.safetensors").read_bytes() == (run / "hf/model.safetensors").read_bytes()


OF_A_PROCESS = {
    "rollout/avg_cached_tokens_per_sample",
    "rollout/prefix_cache_hit_rate",
    "rollout/surplus_groups",
    "rollout/partial_groups",
}
"""What its engines had cached, and what it broke off for a checkpoint: a killed process takes the latter counts along."""


def figures(tiny: TinyRun, run: str) -> list[dict[str, Any]]:
    """What was logged of the training, without times."""
    lines = tiny.metrics(run)
    for line in lines:
        del line["attempt"]
        line["metrics"] = {
            name: value
            for name, value in line["metrics"].items()
            if not name.startswith("perf/") and name not in OF_A_PROCESS
        }
    return lines


def require_covered(row: dict[str, Any], step: int) -> None:
    """Every token has a log-prob and a version that is not too old."""
    length = len(row["tokens"]) - row["prompt_length"]
    assert len(row["rollout_log_probs"]) == len(row["loss_mask"]) == length
    covered = [place for span in row["spans"] for place in range(span["start"], span["end"])]
    assert covered == list(range(length))
    assert all(step - STALENESS <= span["version"] <= step for span in row["spans"])
