"""Drivers that are killed with SIGKILL within a phase of the loop, in each phase once, and started again with the same command.

Where a run does not depend on the time that its parts take, it ends as one that was not killed, to the bit. Partial rollouts
depend on it: no prompt is lost there, and none is trained twice.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks", "dies")]

STEPS, GROUPS, SAMPLES = 8, 2, 2
PHASES = {"rollout": 1, "train": 2, "save": 4, "update_weights": 5, "eval": 7}
"""The first step in which the driver is killed, by phase."""
EVERY = tuple(PHASES)
WORDS = (
    "--plugin", "dies.py", "--reward", "odd", "--num-rollout", str(STEPS), "--save-interval", "2",
    "--rollout-max-response-len", "24", "--eval-interval", "1", "--dump-rollouts", "--save-hf",
    "--set", 'eval.datasets={held_out={path="train.jsonl@[0:4]"}}', "--keep-checkpoints", "9",
)  # fmt: skip
MODES = {
    "sync": ("--generate", "plain"),
    "async": ("--generate", "plain", "--max-async-level", "1"),
    "partial": (
        "--generate", "paced", "--max-async-level", "2", "--partial-rollout", "--over-sampling-batch-size", "4",
        "--max-staleness", "6",
    ),
}  # fmt: skip
DIES = '''
"""The process kills itself in the phase of the file `plan`, at its step or later, once."""
import asyncio, os, random, signal
from dataclasses import replace
from pathlib import Path
from slime_core.plugin import generator, hook, reward
from slime_core.types.completion import FinishReason
from slime_core.types.sample import Status

step = 0
fsync = os.fsync


def die(phase):
    plan = Path("plan")
    if not plan.exists():
        return
    planned, first = plan.read_text().split()
    if planned == phase and step >= int(first):
        plan.unlink()
        with open("died", "a") as file:
            print(phase, os.getpid(), file=file)
        os.kill(os.getpid(), signal.SIGKILL)


def fsync_of_a_checkpoint(file):
    if any(Path("runs/tiny/checkpoints").glob(".step_*.writing/state.json")):
        die("save")
    fsync(file)


@hook
def run_start(event):
    global step
    step = event.rollout_id
    os.fsync = fsync_of_a_checkpoint


@hook
def rollout_end(event):
    global step
    step = event.rollout_id


@hook
def batch_ready(event):
    die("train")


@hook
def update_weights_start(event):
    die("update_weights")


@generator("plain")
async def plain(episode):
    response = episode.trajectory()
    die("eval" if episode.evaluation else "rollout")
    response.append_completion(await episode.complete(response.tokens, episode.sampling))
    return [response.finish()]


@generator("paced")
async def paced(episode):
    """Eight tokens a turn, with a pause before each, so that other phases come between turns."""
    response = episode.trajectory()
    while (room := episode.sampling.max_new_tokens - response.response_length) > 0:
        await asyncio.sleep(random.choice((0, 0.01, 0.02)))
        die("eval" if episode.evaluation else "rollout")
        completion = await episode.complete(response.tokens, replace(episode.sampling, max_new_tokens=min(8, room)))
        response.append_completion(completion)
        if completion.finish_reason is not FinishReason.LENGTH:
            return [response.finish()]
    return [response.finish(status=Status.TRUNCATED)]


@reward("odd")
def odd(sample):
    return float(sample.index % 2)
'''


@pytest.fixture
def dies(tiny: TinyRun) -> None:
    (tiny / "dies.py").write_text(DIES)


def killed_in_each_phase(tiny: TinyRun, words: tuple[str, ...], phases: tuple[str, ...]) -> None:
    """The run is killed and started again until it ends."""
    for phase in phases:
        (tiny / "plan").write_text(f"{phase} {PHASES[phase]}")
        ended = tiny.run(*words)
        assert ended.code == -signal.SIGKILL, ended.err
    ended = tiny.run(*words)
    assert (ended.code, ended.err) == (0, ""), ended.err
    died = [line.split() for line in (tiny / "died").read_text().splitlines()]
    assert [phase for phase, _ in died] == list(phases)
    assert len({pid for _, pid in died}) == len(phases)
    assert json.loads((tiny.runs / "tiny/attempts").read_text()) == len(phases) + 1
    assert tiny.steps() == tiny.steps("train/step") == list(range(STEPS))


def figures(tiny: TinyRun, run: str) -> list[dict[str, Any]]:
    """The logged metrics, without times and what belongs to a process."""
    lines = tiny.metrics(run)
    for line in lines:
        line.pop("attempt")
        kept = {name: value for name, value in line["metrics"].items() if not name.startswith("perf/")}
        line["metrics"] = {name: value for name, value in kept.items() if "cache" not in name}
    return lines


def rows_of(run: Path) -> list[list[dict[str, Any]]]:
    """Rows of the dumped groups, by step."""
    return [pyarrow.parquet.read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist() for step in range(STEPS)]


# A start of Ray takes many seconds, so every phase with it is tested by hand.
@pytest.mark.parametrize(
    ("launcher", "mode", "phases"),
    [
        pytest.param("local", "async", EVERY, id="local-async"),
        pytest.param("ray", "sync", ("save",), marks=pytest.mark.ray, id="ray-sync-save"),
        pytest.param("local", "sync", EVERY, marks=pytest.mark.hand, id="local-sync"),
        pytest.param("ray", "sync", EVERY, marks=[pytest.mark.ray, pytest.mark.hand], id="ray-sync"),
        pytest.param("ray", "async", EVERY, marks=[pytest.mark.ray, pytest.mark.hand], id="ray-async"),
    ],
)
def test_it_ends_as_if_it_had_not_been_killed(tiny: TinyRun, launcher: str, mode: str, phases: tuple[str, ...]) -> None:
    words = (*WORDS, *MODES[mode])
    # In one process, also beside Ray.
    ended = tiny.run(*words, "--name", "straight")
    assert (ended.code, ended.err) == (0, ""), ended.err
    killed_in_each_phase(tiny, (*words, "--launcher", launcher), phases)
    assert figures(tiny, "tiny") == figures(tiny, "straight")
    found, expected = (tiny.runs / name / "hf/model.safetensors" for name in ("tiny", "straight"))
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.hand])])
def test_no_prompt_is_lost_and_none_is_trained_twice(tiny: TinyRun, launcher: str) -> None:
    killed_in_each_phase(tiny, (*WORDS, *MODES["partial"], "--launcher", launcher), EVERY)
    run = tiny.runs / "tiny"
    trained: Counter[int] = Counter()
    responses: Counter[int] = Counter()
    for rows in rows_of(run):
        assert len(rows) == GROUPS * SAMPLES
        trained.update({row["group_index"] for row in rows})
        responses.update(row["index"] for row in rows)
    assert set(trained.values()) == set(responses.values()) == {1}, "a group is trained twice"
    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    state = json.loads((last / "buffer/buffer.json").read_text())
    waiting = {row["group_index"] for row in pyarrow.parquet.read_table(last / "buffer/buffer.parquet").to_pylist()}
    assert not waiting & set(trained)
    assert set(trained) | waiting == set(range(state["source"]["next_group_index"])), "a prompt is lost"
