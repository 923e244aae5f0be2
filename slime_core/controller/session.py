"""Session: a started run. Its methods are the verbs of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS, TRAIN_AXIS, generation_metrics
from slime_core.config.bound import BoundRun
from slime_core.contracts.collector import Collector
from slime_core.contracts.filter import GroupFilter
from slime_core.contracts.hookspecs import (
    EvalDone,
    GroupsFinished,
    PublishEnd,
    PublishStart,
    RejectedGroup,
    RolloutEnd,
    RolloutStart,
    Run,
    StepTrained,
)
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.contracts.tracker import Tracker
from slime_core.contracts.transport import EngineLink, WeightTransport
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import Evaluator
from slime_core.controller.learner import Learner
from slime_core.controller.null_learner import RolloutOnly
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.schedule import ScheduleFile
from slime_core.data.buffer import DataBuffer
from slime_core.data.table import dump_file, write_groups
from slime_core.errors import EngineError, Interrupted, RolloutError
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.counters import middleware_metrics
from slime_core.rollout.groups import GroupRunner
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.supervisor import Admit
from slime_core.rollout.trace import RolloutTrace
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.report import EvalReport, PublishReport, TrainReport
from slime_core.types.sample import SampleGroup
from slime_core.workers.colocation import Residency
from slime_core.workers.train_group import Trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Due(NamedTuple):
    """What follows a rollout step."""

    save: bool
    publish: bool
    evaluate: bool


@dataclass(slots=True, kw_only=True)
class Session:
    """Everything that is running, and the state of the run. Made by `slime_core.controller.startup`, driven by the loop."""

    run: BoundRun
    event: Run
    folder: RunFolder
    num_rollout: int
    tokenizer: PreTrainedTokenizerBase
    buffer: DataBuffer
    collector: Collector[RolloutContext]
    runner: GroupRunner | None
    """None: the collector needs no engine, and none was started."""
    filters: Sequence[GroupFilter]
    client: EngineClient | None
    served_engines: Sequence[ServedEngines]
    """Of models that are not trained."""
    middlewares: Mapping[str, RouterMiddleware]
    """Of the client, by name; a second one of a name has its number behind it."""
    roles: Mapping[str, Trainers]
    """Every trained role by its name; the first is the policy, whose weights the engines get."""
    learner: Learner | RolloutOnly
    residency: Residency
    transport: WeightTransport | None
    evaluator: Evaluator
    store: CheckpointStore
    trackers: Sequence[Tracker]
    hooks: Hooks
    state: RunState
    schedule: ScheduleFile | None = None
    """Where what decided the bits is written down; None: time decides nothing."""
    kept_ahead: list[list[SampleGroup]]
    """Groups of steps beyond the state's that its checkpoint holds."""
    saved_rollout_id: int
    """Steps that the last complete checkpoint holds."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.perf_counter)
    last_eval: EvalReport | None = None
    last_train: TrainReport | None = None
    publish_report: PublishReport | None = None
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    generation: dict[int, dict[str, float]] = field(default_factory=dict)
    """How fast the groups of each step were generated."""
    trace: RolloutTrace = field(default_factory=lambda: RolloutTrace(None))
    ended_early: str | None = None
    """Why there were fewer steps than num_rollout."""
    evaluation: asyncio.Task[None] | None = None
    """On the side."""
    faults: Counter[str] = field(default_factory=Counter)
    """Metrics of lost engines and failed rewards, for the next step's record."""
    between_steps: asyncio.Event = field(default_factory=lambda: set_event())
    """Not set: the trainers have begun optimiser steps of a step that `state` does not count yet."""
    bringing_weights: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Engines get weights from one place at a time: a publish, or the resync of one engine."""

    @property
    def policy(self) -> Trainers:
        return next(iter(self.roles.values()))

    @property
    def trained_versions(self) -> range:
        """Policy versions whose tokens may be trained now, the policy's own last. What engines write that were never brought
        any weights has version -1."""
        oldest = -1 if self.transport is None else self.state.version - self.run.max_staleness
        return range(oldest, self.state.version + 1)

    async def settled(self) -> None:
        """Returns when nothing more is to happen before everything is broken off; at once, outside a replay."""
        await self.collector.settled()
        if self.client is not None:
            await self.client.script.settled()

    async def collect(self, step: int, wanted: asyncio.Future[None] | None = None) -> list[SampleGroup]:
        """The accepted groups of a step. `wanted`: as in RolloutContext."""
        await self.residency.rollout()
        began = time.perf_counter()
        version = self.state.version
        self.hooks.emit(RolloutStart(run=self.event, rollout_id=step, version=version))
        # A step that a checkpoint broke off is collected again, and has counted already.
        counts = self.counts.setdefault(step, Counter())
        context = RolloutContext(
            config=self.run.config.rollout,
            data=self.run.config.data,
            tokenizer=self.tokenizer,
            buffer=self.buffer,
            runner=self.runner,
            filters=self.filters,
            observe=self._groups_finished,
            counts=counts,
            version=version + step - self.state.rollout_id,
            max_staleness=self.run.max_staleness,
            wanted=wanted,
        )
        # Of recorded train data the learner takes its steps from there.
        recorded = self.run.config.train.load_debug_train_data is not None
        groups = [] if recorded else await self.collector.collect(step, context)
        try:
            self._tell_of_rollout(step, groups, version, began)
        except Exception:
            # A pool's groups are nobody's now. Without one, the buffer is put back to before the step.
            if wanted is not None:
                self.put_back(step, groups, kept=self.run.max_staleness > 0)
            raise
        return groups

    def _tell_of_rollout(self, step: int, groups: list[SampleGroup], version: int, began: float) -> None:
        if self.run.generates:
            self.generation[step] = generation_metrics(
                [sample for group in groups for sample in group.samples],
                time.perf_counter() - began,
                self.run.config.launcher.num_engines * self.run.config.launcher.rollout_num_gpus_per_engine,
            )
        if self.run.config.rollout.dump_rollouts:
            self.folder.rollouts.mkdir(exist_ok=True)
            write_groups(dump_file(self.folder.rollouts, step), groups)
        self.hooks.emit(
            RolloutEnd(
                run=self.event,
                rollout_id=step,
                version=version,
                groups=tuple(groups),
                metrics=dict(self.counts[step]),
                seconds=time.perf_counter() - began,
            )
        )

    def put_back(self, step: int, groups: Sequence[SampleGroup], *, kept: bool) -> None:
        """Into the buffer, what no step is going to train as it is: with its answers, or to be generated again."""
        items = [BufferItem(prompt=group.prompt, kind=ItemKind.FRESH, start_rollout_id=step) for group in groups]
        self.buffer.add_samples(
            item.as_surplus(step, group) if kept else item.as_returned(step)
            for item, group in zip(items, groups, strict=True)
        )

    async def train(self, step: int, groups: Sequence[SampleGroup]) -> TrainReport:
        """Scores, credit, optimiser steps."""
        async with self.residency.train():
            return await self.learner.train(step, groups, self.state.version)

    def advance(self, step: int, report: TrainReport, *, rollout_s: float, step_s: float) -> None:
        """The step is done: counts it, tells of it and writes its metrics."""
        first = self.state.optimizer_steps
        # Before anything that can fail: the trainers hold the step, and a checkpoint that did not know would have it trained
        # again. What a tracker that fails lacks is named by its error, and the others have it.
        self.last_train = report
        self.state = replace(
            self.state,
            rollout_id=step + 1,
            version=report.version,
            optimizer_steps=first + len(report.steps),
            tokens=self.state.tokens + int(report.perf["perf/train_tokens"]),
        )
        self.between_steps.set()
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._log_step, step, first, report, rollout_s, step_s)
            self.hooks.emit(StepTrained(run=self.event, rollout_id=step, report=report))

    def _log_step(self, step: int, first: int, report: TrainReport, rollout_s: float, step_s: float) -> None:
        counts = {name: float(number) for name, number in (self.counts.pop(step, Counter()) + self.faults).items()}
        self.faults.clear()
        trained_s = report.perf["perf/train_time"]
        waited_s = max(0.0, step_s - trained_s)
        perf = {
            **report.perf,
            "perf/rollout_time": rollout_s,
            "perf/step_time": step_s,
            "perf/train_wait_time": waited_s,
            "perf/wait_time_ratio": waited_s / step_s,
            **self.generation.pop(step, {}),
            **self.trace.metrics(),
            **self.residency.times(),
        }
        if self.publish_report is not None:
            perf["perf/update_weights_time"] = self.publish_report.seconds
            perf["perf/update_weights_wire_bytes"] = float(self.publish_report.bytes_sent)
            if self.publish_report.density is not None:
                perf["perf/update_weights_density"] = self.publish_report.density
        perf |= middleware_metrics(self.middlewares)
        lines = [(TRAIN_AXIS, first + number, metrics) for number, metrics in enumerate(report.steps)]
        lines.append((ROLLOUT_AXIS, step, {**report.rollout, **counts, **self.buffer.metrics, **perf}))
        self._log(lines, step)

    def is_due(self, step: int) -> Due:
        """What follows `step`."""
        number, last = step + 1, step + 1 == self.num_rollout
        save, evaluate = self.run.config.checkpoint.save_interval, self.run.config.eval.eval_interval
        return Due(
            save=last or (save is not None and number % save == 0),
            publish=last or number % self.run.config.sync.update_weights_interval == 0,
            evaluate=last or (evaluate is not None and number % evaluate == 0),
        )

    async def publish(self) -> None:
        """Brings the current weights to the engines; doing so again changes nothing."""
        if self.client is None or self.transport is None:
            return
        async with self.bringing_weights:
            self.hooks.emit(
                PublishStart(run=self.event, version=self.state.version, num_engines=self.client.num_engines)
            )
            await self.client.each("pause")
            async with self.residency.sync(self.policy):
                self.publish_report = await self._push(self.transport, self.client)
            await self.residency.rollout()
            await self.client.each("resume")
        self.hooks.emit(PublishEnd(run=self.event, report=self.publish_report))

    async def _push(self, transport: WeightTransport, client: EngineClient) -> PublishReport:
        """To all engines in service; again if one was lost in the middle, since that may have kept others from having
        theirs. Lost ones get the weights when they come back."""
        while True:
            before = client.indices
            if not before:
                return PublishReport(version=self.state.version, seconds=0.0, bytes_sent=0, buckets=0)
            try:
                return await transport.push(self.policy, client, self.state.version)
            except EngineError as error:
                # A transport that talks to engines by itself sees their failures first.
                if client.watched:
                    await client.each("health")
                    held = await client.ask("version")
                    behind = [index for index, version in held.items() if version != self.state.version]
                    # If none has the weights, the engines are not to blame.
                    for index in behind if len(behind) < len(held) else ():
                        client.quarantine(index, error)
                if client.indices == before:
                    raise

    async def resync(self, engine: EngineLink, admit: Admit) -> None:
        """Brings the trainer's weights to an engine that was started anew, at once or when the step under way has ended.
        They may be newer than those that the others have."""
        while True:
            await self.between_steps.wait()
            # From its weights to its admission no step begins: it would not find this engine among those that it stills.
            async with self.bringing_weights, self.residency.alone():
                if self.transport is None:
                    await self.residency.rollout(beside=engine)
                    return await admit(None)
                try:
                    async with self.residency.sync(self.policy, beside=engine):
                        version = self.state.version
                        # A step may have begun while others had the trainers: then what they hold is no version yet.
                        if not self.between_steps.is_set():
                            await self.residency.settle(engine)
                            continue
                        await engine.each("pause")
                        await self.transport.push(self.policy, engine, version)
                    await self.residency.rollout(beside=engine)
                    await engine.each("resume")
                except EngineError:
                    # The others go on without it.
                    await self.residency.rollout()
                    raise
                return await admit(version)

    async def evaluate(self, step: int) -> None:
        """All evaluation sets under the published weights. `step` is the last one trained, -1 before the first. On the
        side, it goes on while the run does, until `evaluated`."""
        if not len(self.evaluator):
            return
        await self.evaluated()
        self.state = replace(self.state, eval_owed=True)
        await self.residency.rollout()
        if self.run.config.eval.eval_on_the_side:
            self.evaluation = asyncio.create_task(self._evaluate(step))
        else:
            await self._unless_stopped(self._evaluate(step))

    async def evaluated(self) -> None:
        """Returns when no evaluation is going on. Interrupted if the run is asked to stop before."""
        if self.evaluation is not None:
            evaluation, self.evaluation = self.evaluation, None
            await self._unless_stopped(evaluation)

    async def end_evaluation(self) -> None:
        """Gives an evaluation on the side up: it is owed."""
        if self.evaluation is not None:
            self.evaluation.cancel()
            await asyncio.gather(self.evaluation, return_exceptions=True)
            self.evaluation = None

    async def _evaluate(self, step: int) -> None:
        await self.residency.rollout()
        version = self.state.version if self.publish_report is None else self.publish_report.version
        report, groups = await self.evaluator.evaluate(step, version)
        if step < 0:
            self.state = replace(self.state, eval_before=self.accuracies(report))
        self.state = replace(self.state, eval_owed=False)
        self.last_eval = report
        self._log([(EVAL_AXIS, step + 1, report.metrics)], step)
        self.hooks.emit(EvalDone(run=self.event, report=report, groups=groups))

    async def _unless_stopped(self, evaluation: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Interrupted as soon as the run is asked to stop. A resumed run evaluates again."""
        task, stop = asyncio.ensure_future(evaluation), asyncio.create_task(self.stop_requested.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Interrupted("interrupted while evaluating")
            if task.cancelled():
                # Passed on, it would end the run without a word, as if somebody had asked for that.
                raise RolloutError(
                    "the evaluation was cancelled from within: by a reward, a generator or a middleware."
                )
            task.result()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def accuracies(self, report: EvalReport | None) -> dict[str, float]:
        """The mean reward on each evaluation set, by name."""
        names = [settings.name for settings in self.run.evals]
        return {} if report is None else {name: report.metrics[f"eval/{name}"] for name in names}

    @property
    def may_end_early(self) -> bool:
        """Whether exhausted rollouts end the run instead of failing it."""
        return self.run.config.rollout.on_exhausted == "finish" and self.state.rollout_id > 0

    async def end_early(self, reason: str) -> None:
        """What follows the last step, after the step that turned out to be the last."""
        last = self.state.rollout_id - 1
        await self.publish()
        # The one that was due may have been given up on the side.
        if self.last_eval is None or self.last_eval.rollout_id != last:
            await self.evaluate(last)
        await self.evaluated()
        self.ended_early = reason

    def raise_if_stopped(self) -> None:
        if self.stop_requested.is_set():
            raise Interrupted("interrupted between two steps")

    def _groups_finished(
        self, step: int, accepted: Sequence[SampleGroup], refused: Sequence[tuple[SampleGroup, str]]
    ) -> None:
        self.buffer.source.observe([*accepted, *(group for group, _ in refused)])
        rejected = tuple(RejectedGroup(group=group, reason=reason) for group, reason in refused)
        event = GroupsFinished(run=self.event, rollout_id=step, accepted=tuple(accepted), rejected=rejected)
        self.hooks.emit(event)

    def _log(self, lines: Sequence[tuple[str, int, Mapping[str, float]]], rollout_id: int) -> None:
        """To every tracker, whatever another one raises."""
        with contextlib.ExitStack() as each:
            # It calls the last one first.
            for tracker in reversed(self.trackers):
                each.callback(log_lines, tracker, lines, rollout_id)


def log_lines(tracker: Tracker, lines: Sequence[tuple[str, int, Mapping[str, float]]], rollout_id: int) -> None:
    for axis, step, metrics in lines:
        tracker.log(axis, step, metrics, rollout_id=rollout_id)


def set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
