"""Failures around the optimizer steps of a whole run: the checkpoint holds the state of the trainers, and the run that resumes
from it equals a run without a failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("tiny_forks")]

WORDS = (
    "--plugin", "breaks.py", "--algo.loss", "breaks", "--trackers", "jsonl,breaks", "--num-rollout", "4",
    "--save-interval", "none",
)  # fmt: skip
BREAKS = """
from pathlib import Path

from slime_core.contracts.loss import LossOutput
from slime_core.contracts.tracker import Tracker, TrackerDriver
from slime_core.errors import StorageError
from slime_core.plugin import driver, hook, loss


def breaks_at(place):
    if Path("place").read_text() == place:
        raise ValueError(f"broken at {place}")


@loss("breaks", needs=set())
def breaks(inputs, segments):
    breaks_at("step 2: loss")
    return LossOutput(values=-inputs.log_probs * inputs.advantages)


@hook
def rollout_end(event):
    if event.rollout_id == 2 and Path("place").read_text() == "loss":
        Path("place").write_text("step 2: loss")


@hook
def batch_ready(event):
    breaks_at(f"step {event.rollout_id}: batch")


@hook
def step_trained(event):
    breaks_at(f"step {event.rollout_id}: trained")


class Breaks(Tracker):
    def start(self, run): ...

    def log(self, axis, step, metrics, *, rollout_id): ...

    def finish(self):
        # As what ended the run does.
        if Path("place").read_text() != "nowhere":
            raise StorageError("broken at the end")


@driver("slime.trackers", "breaks")
class BreaksDriver(TrackerDriver):
    @classmethod
    def build(cls, config):
        return Breaks()
"""


def trained(tiny: TinyRun) -> list[tuple[int, Any]]:
    return [(line["step"], line["metrics"]) for line in tiny.metrics() if line["axis"] == "train/step"]


@pytest.mark.parametrize(
    ("place", "saved"),
    [("step 2: batch", ["step_2"]), ("step 2: trained", ["step_3"]), ("loss", [])],
)
def test_a_run_resumes_with_the_state_of_its_trainers(tiny: TinyRun, place: str, saved: list[str]) -> None:
    """Within optimizer steps no checkpoint is written: the weights may have changed in part."""
    (tiny / "breaks.py").write_text(BREAKS)
    (tiny / "place").write_text("nowhere")
    assert tiny.run(*WORDS, "--fresh").code == 0
    straight = trained(tiny)
    assert [step for step, _ in straight] == [0, 1, 2, 3]

    (tiny / "place").write_text(place)
    ended = tiny.run(*WORDS, "--fresh")
    assert "broken at step 2" in ended.err
    assert tiny.checkpoints() == saved
    (tiny / "place").write_text("nowhere")
    assert tiny.run(*WORDS).code == 0
    assert trained(tiny) == straight


def test_weights_that_overflow_end_the_run_and_it_continues_with_a_lower_learning_rate(tiny: TinyRun) -> None:
    """A random model gets no reward, so its gradient is 0; weight decay multiplies the weights by -1e29 in each step."""
    words = ("--lr", "1e30", "--num-rollout", "4", "--save-hf")
    ended = tiny.run(*words, "--fresh")
    assert ended.code == 6
    assert "step 0 teaches nothing: the gradient is 0 (100% of the groups have equal rewards" in ended.out
    run = tiny.runs / "tiny"
    message = " ".join(ended.error.split())
    assert message.startswith("step 1: weight model."), message
    assert "is not finite after optimizer step 1 of the actor (learning rate 1e+30, norm of the gradient 0)." in message
    assert message.endswith(
        f"Lower --lr. To continue from the last checkpoint, {run}/checkpoints/step_1, pass --resume {run} with it."
    )
    assert tiny.checkpoints() == ["step_1"]
    assert not (run / "hf").exists()
    # The same command would begin again from there, and end in the same way.
    resumed = tiny.run("--lr", "1e-6", "--num-rollout", "2", "--save-hf", "--resume", "runs/tiny")
    assert resumed.code == 0, resumed.err
    assert [line["metrics"]["train/lr-pg_0"] for line in tiny.metrics() if line["axis"] == "train/step"] == [1e30, 1e-6]
