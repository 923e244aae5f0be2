"""An asynchronous run with partial rollouts that is killed with SIGKILL: no prompt is lost and none is trained twice. Its
recorded schedule repeats it to the bit, though its generator never takes the same time twice."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun
    from slime_plugin_kit.warm_slime import WarmSlime

pytestmark = pytest.mark.faults

STEPS, GROUPS, SAMPLES, STALENESS = 12, 2, 2, 6
WORDS = (
    "--max-async-level", "2", "--partial-rollout", "--over-sampling-batch-size", "4", "--max-staleness", str(STALENESS),
    "--rollout-max-response-len", "40", "--num-rollout", str(STEPS), "--save-interval", "2", "--dump-rollouts", "--save-hf",
    "--plugin", "paced.py", "--generate", "paced",
)  # fmt: skip
KILLS = 2
PACED = """
import asyncio, random
from pathlib import Path
from dataclasses import replace
from slime_core.plugin import generator
from slime_core.types.completion import FinishReason
from slime_core.types.sample import Status

# Groups of the last step wait while the test has something to do before the end.
HOLD, LAST = Path("hold"), 20


@generator("paced")
async def paced(episode):
    # Ten tokens a turn, with a pause before each: weights and checkpoints come between turns too.
    while episode.prompt.group_index >= LAST and HOLD.exists():
        await asyncio.sleep(0.05)
    response = episode.trajectory()
    while (room := episode.sampling.max_new_tokens - response.response_length) > 0:
        await asyncio.sleep(random.choice((0, 0.01, 0.03)))
        completion = await episode.complete(response.tokens, replace(episode.sampling, max_new_tokens=min(10, room)))
        response.append_completion(completion)
        if completion.finish_reason is not FinishReason.LENGTH:
            return [response.finish()]
    return [response.finish(status=Status.TRUNCATED)]
"""


def kill_when(tiny: TinyRun, condition: Callable[[], bool], pause_s: float = 0.0) -> None:
    process = tiny.start("run", "run.toml", *WORDS)
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    time.sleep(pause_s)
    process.send_signal(signal.SIGKILL)
    given = process.communicate()
    assert process.returncode == -signal.SIGKILL, given


def writes_checkpoint(tiny: TinyRun) -> bool:
    return any((tiny.runs / "tiny" / "checkpoints").glob(".*"))


@pytest.mark.bits
def test_killed_while_weights_and_rollouts_are_in_flight(tiny: TinyRun, warm: WarmSlime) -> None:
    (tiny / "paced.py").write_text(PACED)
    (tiny / "hold").touch()
    kill_when(tiny, lambda: len(tiny.steps_so_far()) >= 3 and writes_checkpoint(tiny))
    kill_when(tiny, lambda: len(tiny.steps_so_far()) >= 7, random.Random(20261121).uniform(0, 0.1))
    (tiny / "hold").unlink()
    ended = tiny.run(*WORDS)
    assert (ended.code, ended.err) == (0, ""), ended.err
    run = tiny.runs / "tiny"
    assert json.loads((run / "attempts").read_text()) == KILLS + 1
    assert tiny.steps() == list(range(STEPS))

    trained: Counter[int] = Counter()
    responses: Counter[int] = Counter()
    several_versions = 0
    for step in range(STEPS):
        rows = pyarrow.parquet.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        trained.update({row["group_index"] for row in rows})
        for row in rows:
            responses[row["index"]] += 1
            require_covered(row, step)
            several_versions += len(row["spans"]) > 1
        assert len(rows) == GROUPS * SAMPLES
    assert set(responses.values()) == {1}, "a response is trained twice"
    assert several_versions, "no response continued under new weights: the test shows nothing"

    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    state = json.loads((last / "buffer/buffer.json").read_text())
    waiting = {row["group_index"] for row in pyarrow.parquet.read_table(last / "buffer/buffer.parquet").to_pylist()}
    assert not waiting & set(trained)
    drawn = state["source"]["next_group_index"]
    assert set(trained) | waiting == set(range(drawn)), "a prompt is lost"

    # A command that must fail removes nothing.
    there = ("--replay-schedule", str(run / "schedule.jsonl"))
    ended = tiny.run(*WORDS, "--fresh", *there)
    assert (ended.code, (run / "summary.json").exists()) == (2, True)
    assert f"--fresh removes {run}, which holds the schedule to replay. Pass another --name" in ended.error
    # Under a name of its own, and without a dump; in a fork, which has another hash seed than a started process.
    tiny.warm = warm
    free = ("--name", "again", "--no-dump-rollouts")
    ended = tiny.run(*WORDS, *free, "--replay-schedule", str(run / "schedule.jsonl"))
    assert (ended.code, ended.err) == (0, ""), ended.err
    again = tiny.runs / "again"
    assert figures(tiny, "again") == figures(tiny, "tiny")
    assert (again / "hf/model.safetensors").read_bytes() == (run / "hf/model.safetensors").read_bytes()


OF_A_PROCESS = {
    "rollout/avg_cached_tokens_per_sample",
    "rollout/prefix_cache_hit_rate",
    "rollout/surplus_groups",
    "rollout/partial_groups",
    "rollout/aborted_groups",
}
"""What its engines had cached, and what it broke off for a checkpoint: a killed process takes the latter counts along."""


def figures(tiny: TinyRun, run: str) -> list[dict[str, Any]]:
    """The logged metrics of the training, without times."""
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
