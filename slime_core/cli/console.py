"""Console: the printed output of a run: a progress bar, evaluations, a few completions, the table at the end."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich import progress
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.table import Table

from slime_core.config.bound import BoundRun
from slime_core.contracts.hookspecs import (
    CheckpointSaved,
    EngineLost,
    EngineRecovered,
    EvalDone,
    RolloutEnd,
    RunEnd,
    RunReady,
    RunStart,
    SampleFailed,
    StepTrained,
    hookimpl,
)
from slime_core.controller.run_folder import RunFolder
from slime_core.rollout.failures import NUMBERS, failure_text
from slime_core.types.sample import SampleGroup

NUM_SHOWN = 3
NUM_KINDS = 20


class Console:
    """An observer of the run. On a terminal it draws a bar; elsewhere it prints a line now and then."""

    def __init__(self, run: BoundRun, *, quiet: bool) -> None:
        self._run = run
        self._rich = RichConsole(quiet=quiet, highlight=False, soft_wrap=not sys.stdout.isatty())
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[status]}"),
            console=self._rich,
            disable=quiet or not self._rich.is_terminal,
        )
        self._task: progress.TaskID | None = None
        self._line_interval = 1
        self._failures: Counter[str] = Counter()
        """Failed attempts by their error, with numbers replaced."""
        self._without_signal = 0
        """Last steps without a learning signal."""

    @hookimpl
    def run_start(self, event: RunStart) -> None:
        run, algo = self._run, self._run.algo
        again = f" (attempt {event.run.attempt}, from step {event.rollout_id})" if event.run.attempt > 1 else ""
        self._rich.print(f"[bold]{escape(event.run.name)}[/] in {escape(str(event.run.run_dir))}{again}")
        self._rich.print(
            f"{algo.name}: advantage {' + '.join(part.name for part in algo.estimators) or 'none'}, loss {algo.loss.name},"
            f" aggregation {algo.keys.aggregation}"
            f" | backend {run.backend.name} x {run.num_ranks}, engine {run.engine.name} x {run.config.launcher.num_engines},"
            f" launcher {run.config.launcher.name}"
        )
        total = run.config.train.num_rollout
        self._line_interval = max(1, (total or 100) // 20)
        self._progress.start()
        self._task = self._progress.add_task("training", total=total, completed=event.rollout_id, status="")

    @hookimpl
    def run_ready(self, event: RunReady) -> None:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in event.lap.parts.items() if seconds >= 0.1)
        self._rich.print(f"ready after {event.lap.seconds:.1f} s: {parts}", style="dim")

    @hookimpl
    def step_trained(self, event: StepTrained) -> None:
        rollout, perf = event.report.rollout, event.report.perf
        learnt = f"loss {event.report.steps[-1].get('train/loss', 0.0):.3f}" if event.report.steps else "not trained"
        if self._run.algo.uses_rewards:
            learnt = f"reward {rollout['rollout/raw_reward']:.3f}"
        status = f"{learnt}  {perf.get('perf/train_tok_per_s', 0.0):,.0f} tok/s trained"
        if self._task is not None:
            self._progress.update(self._task, completed=event.rollout_id + 1, status=status)
        if not self._rich.is_terminal and event.rollout_id % self._line_interval == 0:
            self._rich.print(f"step {event.rollout_id:4d}  {status}")
        self._print_signal(event)

    def _print_signal(self, event: StepTrained) -> None:
        """Prints where steps without a learning signal begin and end."""
        if event.report.no_signal is not None:
            if not self._without_signal:
                self._rich.print(
                    f"[bold]step {event.rollout_id} teaches nothing[/]: {escape(event.report.no_signal)}. Weight decay and "
                    "momentum still change the weights. See docs/troubleshooting.md, Nothing is learned"
                )
            self._without_signal += 1
        elif self._without_signal:
            self._rich.print(f"step {event.rollout_id} teaches something again, after {self._without_signal} without")
            self._without_signal = 0

    @hookimpl
    def rollout_end(self, event: RolloutEnd) -> None:
        interval = self._run.config.debug.print_completions_interval
        if interval is not None and event.rollout_id % interval == 0:
            what = "completions" if self._run.generates else "completions of the data"
            print_completions(self._rich, f"{what} at step {event.rollout_id}", event.groups)

    @hookimpl
    def eval_done(self, event: EvalDone) -> None:
        named = {settings.name for settings in self._run.evals}
        scores = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3f}"
            for name, value in event.report.metrics.items()
            if name.removeprefix("eval/") in named or "-pass@" in name
        )
        after = f"after {event.report.rollout_id + 1} steps"
        self._rich.print(f"[bold]eval[/] {after}: {scores}")
        if self._run.config.debug.print_completions_interval is not None and not self._run.generates:
            for name, groups in event.groups.items():
                print_completions(self._rich, f"completions of {name} {after}", groups)

    @hookimpl
    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        if self._rich.is_terminal:
            self._rich.print(f"checkpoint after {event.rollout_id} steps ({event.seconds:.1f} s)", style="dim")

    @hookimpl
    def engine_lost(self, event: EngineLost) -> None:
        self._rich.print(
            f"[bold]engine {event.engine_index} is lost[/]: {escape(str(event.error))}\n"
            f"  {event.redispatched} requests go to others; it is started again"
        )

    @hookimpl
    def engine_recovered(self, event: EngineRecovered) -> None:
        back = f"with version {event.version}" if event.version >= 0 else "as it was"
        self._rich.print(f"engine {event.engine_index} is back {back}, after {event.seconds:.1f} s")

    @hookimpl
    def sample_failed(self, event: SampleFailed) -> None:
        text = failure_text(event.error)
        kind = NUMBERS.sub("#", text)
        if kind not in self._failures and len(self._failures) >= NUM_KINDS:
            kind = text = "other errors"
        self._failures[kind] += 1
        count = self._failures[kind]
        # The 1st, 10th, 100th, ... of a kind.
        if f"{count}".rstrip("0") == "1":
            then = "it is tried again" if event.will_retry else "events.jsonl has all of them"
            times = "" if count == 1 else f", {count} times by now"
            self._rich.print(f"[bold]a response failed[/]{times}: {escape(text)}; {then}")

    @hookimpl
    def run_end(self, event: RunEnd) -> None:
        self._progress.stop()
        if self._without_signal > 1:
            self._rich.print(f"the last {self._without_signal} steps taught nothing: see where they began, above")

    def sum_up(self, summary: Mapping[str, Any], folder: RunFolder) -> None:
        """The table at the end."""
        before, after = summary["eval"]["before"], summary["eval"]["after"]
        if after:
            table = Table(
                "evaluation", "before", "after", title=f"{summary['steps']} steps, {summary['seconds']:.0f} s"
            )
            for name, value in after.items():
                table.add_row(name, f"{before[name]:.3f}" if name in before else "", f"{value:.3f}")
            self._rich.print(table)
        if "ended_early" in summary:
            self._rich.print(f"ended after {summary['steps']} steps: {escape(summary['ended_early'])}")
        written = [folder.summary, folder.hf, *sorted(folder.path.glob("*.png"))]
        self._rich.print("written: " + ", ".join(escape(str(path)) for path in written if path.exists()))


def print_completions(rich: RichConsole, title: str, groups: Sequence[SampleGroup]) -> None:
    """The first few, one of each group."""
    rich.print(f"{escape(title)}:")
    for group in groups[:NUM_SHOWN]:
        sample = group.samples[0]
        reward = "-" if sample.reward is None else f"{sample.reward:g}"
        rich.print(f"  [dim]{escape(repr(group.prompt.text[-60:]))}[/] {escape(repr(sample.response[:80]))} {reward}")
