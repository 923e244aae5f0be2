"""Session: a started run. Its methods are the actions of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from slime_core.algorithm.metrics import EVAL_AXIS, ROLLOUT_AXIS, TRAIN_AXIS, generation_metrics
from slime_core.config.bound import BoundRun
from slime_core.contracts.collector import Collector
from slime_core.contracts.filter import GroupFilter
from slime_core.contracts.hookspecs import (
    EvalDone,
    GroupsFinished,
    RejectedGroup,
    RolloutEnd,
    RolloutStart,
    Run,
    RunReady,
    StepTrained,
    UpdateWeightsEnd,
    UpdateWeightsStart,
)
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.contracts.tracker import Tracker
from slime_core.contracts.transport import EngineGroup, WeightTransport
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import Evaluator
from slime_core.controller.learner import Learner
from slime_core.controller.null_learner import NullLearner
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.schedule import ScheduleFile
from slime_core.data.buffer import DataBuffer
from slime_core.data.table import dump_file, write_groups
from slime_core.errors import EngineError, Interrupted, RolloutError
from slime_core.registry.boundary import foreign, require
from slime_core.registry.hooks import Hooks
from slime_core.rollout.client import EngineClient
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.counters import middleware_metrics
from slime_core.rollout.engine_health_monitor import Admit
from slime_core.rollout.groups import GroupRunner
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.trace import RolloutTrace
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.report import EvalReport, Lap, TrainReport, WeightUpdateReport
from slime_core.types.sample import SampleGroup
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.stopwatch import StartTimes, Stopwatch
from slime_core.workers.train_group import TrainGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BESIDE_SYNC: Final = frozenset({"save", "eval", "drain", "other"})
"""Parts of a step before its rollout that are not its weight update."""


class StepActions(NamedTuple):
    """The actions that follow a rollout step."""

    save: bool
    update_weights: bool
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
    """Engines of models that are not trained."""
    middlewares: Mapping[str, RouterMiddleware]
    """Middlewares of the client, by name; a second one of the same name gets a number behind it."""
    roles: Mapping[str, TrainGroup]
    """Every trained role by its name; the first is the policy, whose weights the engines get."""
    learner: Learner | NullLearner
    colocation: ColocationManager
    transport: WeightTransport | None
    evaluator: Evaluator
    store: CheckpointStore
    trackers: Sequence[Tracker]
    hooks: Hooks
    state: RunState
    schedule: ScheduleFile | None = None
    """The recorded schedule; None: the results do not depend on timing."""
    kept_ahead: list[list[SampleGroup]]
    """Groups of steps beyond the state's that its checkpoint holds."""
    saved_rollout_id: int
    """Steps that the last complete checkpoint holds."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.perf_counter)
    last_eval: EvalReport | None = None
    last_train: TrainReport | None = None
    weight_update_report: WeightUpdateReport | None = None
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    rejected: dict[int, list[SampleGroup]] = field(default_factory=dict)
    """Rejected groups of complete steps, which the source has not observed yet."""
    generation: dict[int, dict[str, float]] = field(default_factory=dict)
    """Generation metrics of each step."""
    trace: RolloutTrace = field(default_factory=lambda: RolloutTrace(None))
    start_times: StartTimes | None = None
    start_metrics: dict[str, float] = field(default_factory=dict)
    """Of the start, for the first step's record."""
    ended_early: str | None = None
    """Why there were fewer steps than num_rollout."""
    evaluation: asyncio.Task[None] | None = None
    """The evaluation on the side that is running."""
    faults: Counter[str] = field(default_factory=Counter)
    """Metrics of lost engines and failed rewards, for the next step's record."""
    optimizer_idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: the trainers have begun optimizer steps of a step that `state` does not count yet."""
    weight_update_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by a weight update of all engines, or of one that was restarted: never both at a time."""

    def __post_init__(self) -> None:
        self.optimizer_idle.set()

    @property
    def policy(self) -> TrainGroup:
        return next(iter(self.roles.values()))

    @property
    def times(self) -> Stopwatch:
        """What the time is spent on; a lap ends when a step is trained."""
        return self.colocation.times

    @property
    def trained_versions(self) -> range:
        """Policy versions whose tokens may be trained now, the policy's own last. Engines that never got a weight update
        report version -1."""
        oldest = -1 if self.transport is None else self.state.version - self.run.max_staleness
        return range(oldest, self.state.version + 1)

    def begin_steps(self) -> None:
        """Ends the start: what it was spent on becomes an event, and metrics of the first step."""
        lap = self.times.lap()
        if self.start_times is not None:
            lap = self.start_times.ready(lap)
            self.start_metrics = {"perf/start_time": lap.seconds, **lap.metrics("perf/start/")}
            self.hooks.emit(RunReady(run=self.event, lap=lap))

    async def settled(self) -> None:
        """In a replay, returns when all recorded events have happened and everything can be aborted; else at once."""
        await self.collector.settled()
        if self.client is not None:
            await self.client.script.settled()

    async def collect(self, step: int, is_next: asyncio.Future[None] | None = None) -> list[SampleGroup]:
        """The accepted groups of a step. `is_next`: as in RolloutContext."""
        await self.colocation.rollout()
        began = time.perf_counter()
        version = self.state.version
        self.hooks.emit(RolloutStart(run=self.event, rollout_id=step, version=version))
        # A step that a checkpoint aborted is collected again; its counters continue.
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
            is_next=is_next,
        )
        # With recorded train data the learner reads its steps from there.
        recorded = self.run.config.train.load_debug_train_data is not None
        groups: list[SampleGroup] = []
        try:
            if not recorded:
                with foreign(self.collector, f"collect of step {step}", error=RolloutError):
                    groups = await self.collector.collect(step, context)
                    fits = isinstance(groups, list) and all(isinstance(group, SampleGroup) for group in groups)
                    require(fits, self.collector, f"collect of step {step}", groups, "a list of SampleGroups")
            self._report_rollout(step, groups, version, began)
        except Exception:
            # The groups of a pool have no owner now. Without a pool, the buffer is restored to before the step.
            if is_next is not None:
                self.requeue_groups(step, groups, kept=self.run.max_staleness > 0)
            self.buffer.observe(self.rejected.pop(step, []))
            raise
        if groups:
            # Not before: groups that go back to the buffer are observed when they are collected again.
            self.buffer.observe([*groups, *self.rejected.pop(step, [])])
        return groups

    def _report_rollout(self, step: int, groups: list[SampleGroup], version: int, began: float) -> None:
        if self.run.generates:
            self.generation[step] = generation_metrics(
                [sample for group in groups for sample in group.samples],
                time.perf_counter() - began,
                self.run.config.launcher.num_engines * self.run.config.launcher.rollout_num_gpus_per_engine,
            )
        if self.run.config.rollout.dump_rollouts:
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

    def requeue_groups(self, step: int, groups: Sequence[SampleGroup], *, kept: bool) -> None:
        """Puts groups that no step will train back into the buffer. `kept`: with their responses, else to regenerate."""
        items = [BufferItem(prompt=group.prompt, kind=ItemKind.FRESH, start_rollout_id=step) for group in groups]
        self.buffer.add_samples(
            item.as_surplus(step, group) if kept else item.as_returned(step)
            for item, group in zip(items, groups, strict=True)
        )

    async def train(self, step: int, groups: Sequence[SampleGroup]) -> TrainReport:
        """Scores the groups, computes advantages and takes the optimizer steps."""
        with self.times.of("train"):
            async with self.colocation.train():
                return await self.learner.train(step, groups, self.state.version)

    def advance(self, step: int, report: TrainReport) -> None:
        """Counts a trained step, emits its event and logs its metrics."""
        first, lap = self.state.optimizer_steps, self.times.lap()
        # First, before anything that can fail: the trainers hold the step, and a checkpoint with the old state would train it
        # again. The error of a failing tracker names the metrics that it lacks; the other trackers have them.
        self.last_train = report
        self.state = replace(
            self.state,
            rollout_id=step + 1,
            version=report.version,
            optimizer_steps=first + len(report.steps),
            tokens=self.state.tokens + int(report.perf["perf/train_tokens"]),
        )
        self.optimizer_idle.set()
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._log_step, step, first, report, lap)
            self.hooks.emit(StepTrained(run=self.event, rollout_id=step, report=report, lap=lap))

    def _log_step(self, step: int, first: int, report: TrainReport, lap: Lap) -> None:
        counts = {name: float(number) for name, number in (self.counts.pop(step, Counter()) + self.faults).items()}
        self.faults.clear()
        # Between two steps, before rollouts are waited for.
        between = itertools.takewhile(lambda span: span[0] not in ("rollout", "train"), lap.spans)
        idle_s = sum(lap.parts.get(part, 0.0) for part in ("rollout", "drain", "engine_sleep"))
        perf = {
            **report.perf,
            "perf/step_time": lap.seconds,
            "perf/train_wait_time": idle_s,
            "perf/wait_time_ratio": idle_s / lap.seconds,
            **self.generation.pop(step, {}),
            **self.trace.metrics(),
            **lap.metrics(),
            "perf/sync_time": sum(end - start for part, start, end in between if part not in BESIDE_SYNC),
            **self.start_metrics,
        }
        self.start_metrics = {}
        if self.weight_update_report is not None:
            perf["perf/update_weights_push_time"] = self.weight_update_report.seconds
            perf["perf/update_weights_wire_bytes"] = float(self.weight_update_report.bytes_sent)
            if self.weight_update_report.density is not None:
                perf["perf/update_weights_density"] = self.weight_update_report.density
        perf |= middleware_metrics(self.middlewares)
        lines = [(TRAIN_AXIS, first + number, metrics) for number, metrics in enumerate(report.steps)]
        lines.append((ROLLOUT_AXIS, step, {**report.rollout, **counts, **self.buffer.metrics, **perf}))
        self._log(lines, step)

    def is_due(self, step: int) -> StepActions:
        """The actions that are due after `step`."""
        number, last = step + 1, step + 1 == self.num_rollout
        save, evaluate = self.run.config.checkpoint.save_interval, self.run.config.eval.eval_interval
        return StepActions(
            save=last or (save is not None and number % save == 0),
            update_weights=last or number % self.run.config.sync.update_weights_interval == 0,
            evaluate=last or (evaluate is not None and number % evaluate == 0),
        )

    async def update_weights(self) -> None:
        """Sends the current weights to the engines; a second call changes nothing."""
        if self.client is None or self.transport is None:
            return
        with self.times.of("update_weights"):
            async with self.weight_update_lock:
                self.hooks.emit(
                    UpdateWeightsStart(run=self.event, version=self.state.version, num_engines=self.client.num_engines)
                )
                await self.client.call_all("pause")
                async with self.colocation.sync(self.policy):
                    self.weight_update_report = await self._push(self.transport, self.client)
                await self.colocation.rollout()
                await self.client.call_all("resume")
        self.hooks.emit(UpdateWeightsEnd(run=self.event, report=self.weight_update_report))

    async def _push(self, transport: WeightTransport, client: EngineClient) -> WeightUpdateReport:
        """Updates the weights of all engines in service; repeats it if one was lost meanwhile, since others may then not have
        theirs. Lost engines get the weights when they are restarted."""
        while True:
            before = client.indices
            if not before:
                return WeightUpdateReport(version=self.state.version, seconds=0.0, bytes_sent=0, buckets=0)
            try:
                return await transport.push(self.policy, client, self.state.version)
            except EngineError as error:
                # A transport with connections of its own sees the failures of engines first.
                if client.watched:
                    await client.call_all("health")
                    held = await client.call_by_index("version")
                    behind = [index for index, version in held.items() if version != self.state.version]
                    # If no engine has the weights, the engines are not the cause.
                    for index in behind if len(behind) < len(held) else ():
                        client.quarantine(index, error)
                if client.indices == before:
                    raise

    async def update_engine_weights(self, engine: EngineGroup, admit: Admit) -> None:
        """Sends the trainer's weights to a restarted engine, at once or when the step under way has ended. They may be newer
        than the weights of the other engines."""
        while True:
            await self.optimizer_idle.wait()
            if self.client is not None and self.run.weights_follow:
                await self.client.awake()
            # No step begins between the weight update and the admission: it would not pause this engine.
            async with self.weight_update_lock, self.colocation.exclusive():
                if self.transport is None:
                    await self.colocation.rollout(joining=engine)
                    return await admit(None)
                if self.colocation.weights_asleep and self.run.weights_follow:
                    # The other engines may have dropped theirs: the weight update that is due comes first.
                    continue
                try:
                    async with self.colocation.sync(self.policy, joining=engine):
                        version = self.state.version
                        # A step may have begun meanwhile: then the trainers' weights are no policy version yet.
                        if not self.optimizer_idle.is_set():
                            await self.colocation.settle(engine)
                            continue
                        await engine.call_all("pause")
                        await self.transport.push(self.policy, engine, version)
                    await self.colocation.rollout(joining=engine)
                    await engine.call_all("resume")
                except EngineError:
                    # The other engines continue without it.
                    await self.colocation.rollout()
                    raise
                return await admit(version)

    async def evaluate(self, step: int) -> None:
        """Evaluates all sets with the weights that the engines have. `step`: the last one trained, -1 before the first. On the
        side, it continues while the run does, until `evaluated`."""
        if not len(self.evaluator):
            return
        await self.evaluated()
        self.state = replace(self.state, eval_owed=True)
        await self.colocation.rollout()
        if self.run.config.eval.async_eval:
            self.evaluation = asyncio.create_task(self._evaluate(step))
        else:
            await self._unless_stopped(self._evaluate(step))

    async def evaluated(self) -> None:
        """Returns when no evaluation is running. Interrupted if the run is asked to stop before."""
        if self.evaluation is not None:
            evaluation, self.evaluation = self.evaluation, None
            await self._unless_stopped(evaluation)

    async def end_evaluation(self) -> None:
        """Cancels an evaluation on the side; the run makes it up when it resumes."""
        if self.evaluation is not None:
            self.evaluation.cancel()
            await asyncio.gather(self.evaluation, return_exceptions=True)
            self.evaluation = None

    async def _evaluate(self, step: int) -> None:
        await self.colocation.rollout()
        version = self.state.version if self.weight_update_report is None else self.weight_update_report.version
        report, groups = await self.evaluator.evaluate(step, version)
        if step < 0:
            self.state = replace(self.state, eval_before=self.accuracies(report))
        self.state = replace(self.state, eval_owed=False)
        self.last_eval = report
        self._log([(EVAL_AXIS, step + 1, report.metrics)], step)
        self.hooks.emit(EvalDone(run=self.event, report=report, groups=groups))

    async def _unless_stopped(self, evaluation: Coroutine[Any, Any, None] | asyncio.Task[None]) -> None:
        """Awaits the evaluation; Interrupted as soon as the run is asked to stop. A resumed run evaluates again."""
        task = asyncio.ensure_future(evaluation)
        try:
            with self.times.of("eval"):
                await self.wait_unless_stopped(task, doing="evaluating")
            if task.cancelled():
                # Propagated, the cancellation would end the run without an error, as if it had been interrupted.
                raise RolloutError(
                    "the evaluation was cancelled from within: by a reward, a generator or a middleware."
                )
            task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_unless_stopped(self, *tasks: asyncio.Future[Any], doing: str) -> None:
        """Waits until one of the tasks is done; Interrupted if the run is asked to stop before."""
        stop = asyncio.create_task(self.stop_requested.wait())
        try:
            await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if not any(task.done() for task in tasks):
            raise Interrupted(f"interrupted while {doing}")

    def accuracies(self, report: EvalReport | None) -> dict[str, float]:
        """The mean reward on each evaluation set, by name."""
        names = [settings.name for settings in self.run.evals]
        return {} if report is None else {name: report.metrics[f"eval/{name}"] for name in names}

    @property
    def may_end_early(self) -> bool:
        """True if exhausted rollouts end the run without an error."""
        return self.run.config.rollout.on_exhausted == "finish" and self.state.rollout_id > 0

    async def end_early(self, reason: str) -> None:
        """Runs the actions of the last step after the step that turned out to be the last."""
        last = self.state.rollout_id - 1
        await self.update_weights()
        # The evaluation that was due may have been cancelled on the side.
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
        groups = [group for group, _ in refused]
        if accepted:
            self.rejected[step] = groups
        else:
            self.buffer.observe(groups)
        rejected = tuple(RejectedGroup(group=group, reason=reason) for group, reason in refused)
        event = GroupsFinished(run=self.event, rollout_id=step, accepted=tuple(accepted), rejected=rejected)
        self.hooks.emit(event)

    def _log(self, lines: Sequence[tuple[str, int, Mapping[str, float]]], rollout_id: int) -> None:
        """Logs to every tracker, also if another one raises."""
        with contextlib.ExitStack() as each:
            # ExitStack calls the last one first.
            for tracker in reversed(self.trackers):
                each.callback(log_lines, tracker, lines, rollout_id)


def log_lines(tracker: Tracker, lines: Sequence[tuple[str, int, Mapping[str, float]]], rollout_id: int) -> None:
    for axis, step, metrics in lines:
        with foreign(tracker, f"log of {axis} {step}"):
            tracker.log(axis, step, metrics, rollout_id=rollout_id)
