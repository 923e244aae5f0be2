"""The times of the steps add up to the time that the loop takes, and the parts of a step to the step. On a clock that does not
wait, so that the sums are exact."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from slime_core.contracts.hookspecs import StepTrained, hookimpl
from slime_core.contracts.tracker import Tracker
from slime_core.controller.loop import run_loop
from slime_core.registry import Registry
from slime_core.registry.hooks import Hooks
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices
from slime_plugin_kit.fast_clock import run_fast
from slime_plugin_kit.simulated_run import IdleRanks, Simulation
from slime_plugin_kit.timed_engine import TimedEngine

STEPS = 5
TRAIN_S = 7.0
PARTS = (
    "rollout", "drain", "train", "update_weights", "sleep", "wake_up", "engine_sleep", "engine_wake_up", "save", "eval",
    "other",
)  # fmt: skip


class Ranks(IdleRanks):
    """Seconds: 4 to be offloaded or onloaded, 11 to write a checkpoint."""

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        await asyncio.sleep(4.0)
        return []

    async def save(self, folder: Path) -> None:
        await asyncio.sleep(11.0)
        await super().save(folder)


class Log(Tracker):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.at: list[float] = []
        self.laps: list[Any] = []

    @hookimpl
    def step_trained(self, event: StepTrained) -> None:
        self.laps.append(event.lap)

    def start(self, run: Any) -> None: ...

    def log(self, axis: str, step: int, metrics: Any, *, rollout_id: int) -> None:
        if axis == "rollout/step":
            self.steps.append(dict(metrics))
            self.at.append(time.perf_counter())

    def finish(self) -> None: ...


def on_the_clock() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0


def steps_of(folder: Path, rollout: dict[str, Any], *, shared: bool, eval_prompts: int = 0) -> Log:
    engine = TimedEngine(slots=8, rate=lambda running: 1.0, length=lambda request: 5 + 20 * (request.seed % 2))
    simulation = Simulation(
        folder=folder,
        engines=[engine],
        num_rollout=STEPS,
        rollout={"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 50, **rollout},
        train_s=TRAIN_S,
        update_weights_s=3.0,
        save_interval=2,
        ranks=Ranks(),
        eval_prompts=eval_prompts,
    )
    session, log = simulation.session(), Log()
    session.trackers = [log]
    session.hooks = Hooks.load(Registry(()), own={"log": log})
    if shared:
        session.colocation = ColocationManager(Devices(offload=True), session.client, shared=True, offload_rollout=True)
    run_fast(run_loop(session))
    return log


@pytest.mark.parametrize(
    ("rollout", "shared", "eval_prompts"),
    [({}, True, 2), ({"max_async_level": 2, "update_weights_in_flight": False}, False, 0)],
    ids=["on shared devices", "ahead"],
)
def test_step_times_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any], shared: bool, eval_prompts: int
) -> None:
    monkeypatch.setattr(time, "perf_counter", on_the_clock)
    log = steps_of(tmp_path, rollout, shared=shared, eval_prompts=eval_prompts)
    steps = log.steps
    for before, after, step in zip(log.at, log.at[1:], steps[1:], strict=False):
        assert step["perf/step_time"] == pytest.approx(after - before)
    for step, lap in zip(steps, log.laps, strict=True):
        assert step["perf/step_time"] == pytest.approx(sum(step.get(f"perf/{part}_time", 0.0) for part in PARTS))
        assert step["perf/other_time"] == 0.0
        assert step["perf/train_time"] == TRAIN_S
        # The spans follow each other, and are the same seconds.
        assert [start for _, start, _ in lap.spans] == pytest.approx([0.0, *(end for *_, end in lap.spans[:-1])])
        assert lap.spans[-1][2] == pytest.approx(lap.seconds)
        waited = step["perf/rollout_time"] + step.get("perf/drain_time", 0.0) + step.get("perf/engine_sleep_time", 0.0)
        assert step["perf/train_wait_time"] == pytest.approx(waited)
        assert step["perf/wait_time_ratio"] == pytest.approx(waited / step["perf/step_time"])
    # Saved after the second step and the fourth: what it took is of the step behind it.
    assert ["perf/save_time" in step for step in steps] == [False, False, True, False, True]
    assert [step["perf/sync_time"] for step in steps[1:]] == pytest.approx([11.0 if shared else 3.0] * (STEPS - 1))
    assert [step["perf/update_weights_time"] for step in steps[1:]] == pytest.approx([3.0] * (STEPS - 1))
    if shared:
        # The trainer is onloaded to send its weights and then offloaded; neither counts for the weight update.
        assert all(step["perf/sleep_time"] >= 4.0 for step in steps[1:])
        assert any("perf/eval_time" in step for step in steps)
    else:
        assert any(step.get("perf/drain_time", 0.0) > 0 for step in steps)
