"""Records what the page of `slime view` shows and a run does not write itself, in view/ of the run folder.

Samples of trained steps (without --dump-rollouts) and of evaluations, the trainer's numbers of each token, and when what began
and ended.
`SLIME_PLUGINS_DENY=slime-viewer` switches it off.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from slime_core.contracts.hookspecs import (
    BatchReady,
    CheckpointSaved,
    EvalDone,
    RolloutEnd,
    RolloutStart,
    Run,
    RunEnd,
    RunStart,
    StepTrained,
    UpdateWeightsEnd,
    UpdateWeightsStart,
    hookimpl,
)
from slime_viewer.lanes import ENGINES, TRAINER

if TYPE_CHECKING:
    from slime_viewer.recording import Recording

ROLE_TRAIN_TIME: Final = re.compile(r"perf/(\w+)_train_time")
SLACK: Final = 0.02
"""Share of a span by which clocks may differ."""


class Recorder:
    """An observer. Files are written by a thread; what it cannot write ends the recording, not the run."""

    def __init__(self) -> None:
        self._recording: Recording | None = None
        self._rollouts: dict[int, float] = {}
        """When the rollout of a step began."""
        self._update = 0.0
        """When the last weight update began."""
        self._free = 0.0
        """Since when the trainer has nothing to do."""

    @hookimpl
    def run_start(self, event: RunStart) -> None:
        # Imported here: `slime` loads observers before it checks a run, and Arrow takes a while.
        from slime_viewer.recording import Recording

        self._recording = Recording(event.run.run_dir, attempt=event.run.attempt)
        self._rollouts.clear()
        self._free = time.time()

    @hookimpl
    def rollout_start(self, event: RolloutStart) -> None:
        self._rollouts.setdefault(event.rollout_id, time.time())

    @hookimpl
    def rollout_end(self, event: RolloutEnd) -> None:
        now = time.time()
        self._span(ENGINES, "rollout", self._rollouts.pop(event.rollout_id, now - event.seconds), now, event.rollout_id)
        dumped = chosen(event.run, "rollout", "dump_rollouts")
        if self._recording is not None and event.groups and not dumped and self._recording.takes(event.rollout_id):
            self._recording.do(partial(self._recording.write_groups, event.rollout_id, event.groups))
        self._measure()

    @hookimpl
    def batch_ready(self, event: BatchReady) -> None:
        dumped = chosen(event.run, "debug", "save_debug_train_data")
        if self._recording is not None and not dumped and self._recording.takes(event.rollout_id):
            self._recording.do(partial(self._recording.write_tokens, event.rollout_id, event.batch, event.columns))

    @hookimpl
    def step_trained(self, event: StepTrained) -> None:
        now, perf, step = time.time(), event.report.perf, event.rollout_id
        began = max(self._free, now - perf.get("perf/train_time", 0.0))
        scored = min(now, began + perf.get("perf/score_time", 0.0))
        self._span(TRAINER, "wait", self._free, began, step)
        self._span(TRAINER, "score", began, scored, step)
        self._span(TRAINER, "train", scored, now, step)
        for role, start, end in turns(perf, scored, now):
            self._span(f"{TRAINER}: {role}", "train", start, end, step)
        self._free = now
        self._measure()

    @hookimpl
    def update_weights_start(self, event: UpdateWeightsStart) -> None:
        self._update = time.time()

    @hookimpl
    def update_weights_end(self, event: UpdateWeightsEnd) -> None:
        now = time.time()
        for lane in (TRAINER, ENGINES):
            self._span(lane, "weights", self._update, now, event.report.version - 1)
        self._free = now
        self._measure()

    @hookimpl
    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        now = time.time()
        self._span(TRAINER, "save", now - event.blocked_seconds, now, event.rollout_id - 1)
        self._free = max(self._free, now)

    @hookimpl
    def eval_done(self, event: EvalDone) -> None:
        now, step = time.time(), event.report.rollout_id
        if not chosen(event.run, "eval", "async_eval"):
            for lane, kind in ((ENGINES, "eval"), (TRAINER, "wait")):
                self._span(lane, kind, self._free, now, step)
            self._free = now
        if self._recording is not None:
            for name, groups in event.groups.items():
                self._recording.do(partial(self._recording.write_evaluation, name, step + 1, groups))

    @hookimpl
    def run_end(self, event: RunEnd) -> None:
        if self._recording is not None:
            self._recording.end()
            self._recording = None

    def _span(self, lane: str, kind: str, start: float, end: float, step: int) -> None:
        if self._recording is not None and end > start:
            line: dict[str, Any] = {
                "lane": lane,
                "kind": kind,
                "from": round(start, 4),
                "to": round(end, 4),
                "step": step,
            }
            self._recording.do(partial(self._recording.write_line, line))

    def _measure(self) -> None:
        if self._recording is not None:
            self._recording.do(self._recording.write_memory)


def turns(perf: Mapping[str, float], start: float, end: float) -> Iterator[tuple[str, float, float]]:
    """When each of several trained roles took its optimizer steps: one after the other where their seconds fit, else at once.
    Nothing for one role alone."""
    seconds = {found[1]: value for name, value in perf.items() if (found := ROLE_TRAIN_TIME.fullmatch(name))}
    in_turns = sum(seconds.values()) <= (end - start) * (1 + SLACK)
    if len(seconds) > 1:
        for role, took in seconds.items():
            yield role, start, min(end, start + took)
            start += took if in_turns else 0.0


def chosen(run: Run, table: str, key: str) -> Any:
    """A value of the run's config; None if a program that has no whole config emits the events."""
    return run.config.get(table, {}).get(key)
