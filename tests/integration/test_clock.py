"""A wall clock that is set back and forward by hours while a run works and between its attempts: durations stay what they were,
and the newest checkpoint is still the one of the highest step."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

JUMPING = """
import itertools, time
from slime_core.plugin import hook

clock, hours = time.time, itertools.cycle([0, -30, 20, -5, 40])
time.time = lambda: clock() + 3600 * next(hours)


@hook
def batch_ready(event):
    pass
"""


def test_a_clock_that_is_set_while_a_run_works(tiny: TinyRun) -> None:
    (tiny / "jumping.py").write_text(JUMPING)
    words = ("--plugin", "jumping.py", "--trace-samples")
    assert tiny.run(*words, "--num-rollout", "2").code == 0
    assert tiny.run(*words, "--num-rollout", "3", "--resume", "runs/tiny").code == 0
    assert tiny.steps() == [0, 1, 2]
    assert tiny.checkpoints() == ["step_1", "step_2", "step_3"]
    folder = tiny.runs / "tiny"
    lines = [json.loads(line) for name in ("events", "traces") for line in (folder / f"{name}.jsonl").open()]
    durations = {
        f"{name} of {line}": value
        for line in [
            *lines,
            *(record["metrics"] for record in tiny.metrics()),
            json.loads((folder / "summary.json").read_text()),
        ]
        for name, value in line.items()
        if name in ("seconds", "blocked_seconds") or (name.endswith(("_s", "_time")) and not name.endswith("_per_s"))
    }
    assert len(durations) > 20
    # The spans of a step follow each other and are its metrics, though the clock was set between them.
    parts = ("rollout", "drain", "train", "update_weights", "save", "eval", "other")
    steps = [record["metrics"] for record in tiny.metrics() if record["axis"] == "rollout/step"]
    for step, event in zip(steps, [line for line in lines if line.get("event") == "step_time"], strict=True):
        spans = event["spans"]
        assert sum(step.get(f"perf/{part}_time", 0.0) for part in parts) == pytest.approx(step["perf/step_time"])
        assert sum(end - start for _, start, end in spans) == pytest.approx(event["seconds"], rel=0.01, abs=0.01)
        assert all(before[2] <= after[1] + 0.001 for before, after in itertools.pairwise(spans))
    (first, second) = (line for line in lines if line.get("event") == "start_time")
    assert {"driver", "trainer/imports", "trainer/load", "engine/other"} <= {part for part, _, _ in second["spans"]}
    assert first["seconds"] == pytest.approx(steps[0]["perf/start_time"], abs=0.001)
    assert not {name: value for name, value in durations.items() if not 0 <= value < 3600}
    assert all(
        value >= 0 for record in tiny.metrics() for name, value in record["metrics"].items() if "tok_per_s" in name
    )
