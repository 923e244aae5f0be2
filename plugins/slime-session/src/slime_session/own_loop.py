"""OwnLoop: what a loop of one's own does with a started run, as coroutines in the run's event loop, one at a time.

A rollout step is what lies between two rollouts or weight updates: gradients of one batch or several, and optimizer steps. When
it ends, the policy's version rises by one, and observers and trackers get its report, as in `slime run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from slime_core.cli.training import export_hf
from slime_core.config.bound import BoundRun
from slime_core.contracts.optimizer import StepSettings
from slime_core.contracts.renderer import Renderer
from slime_core.controller.learner import Learner, LearnerBatch
from slime_core.controller.loop import RolloutPrefetcher
from slime_core.controller.role_task import RoleReport, RoleTask, join_steps
from slime_core.controller.saving import CheckpointSaver
from slime_core.controller.session import Session
from slime_core.errors import ConfigError, RolloutError, RolloutsExhausted, TrainingError
from slime_core.registry.boundary import foreign
from slime_core.rollout.client import EngineClient
from slime_core.rollout.groups import GroupRunner, RunningGroup, all_or_none
from slime_core.rollout.scoring import is_scored
from slime_core.types.batch import Float32, TokenColumns
from slime_core.types.buffer_item import BufferItem
from slime_core.types.prompt import Prompt
from slime_core.types.report import EvalReport, TrainReport, WeightUpdateReport
from slime_core.types.sample import Sample, SampleGroup
from slime_core.workers.recorded_objective import Gradients
from slime_core.workers.train_group import TrainGroup
from slime_session.aborted_tasks import all_or_aborted
from slime_session.datum import Datum, columns_of, groups_of
from slime_session.engine_adapters import SnapshotClient
from slime_session.engine_weights import EngineWeights
from slime_session.loss_choice import Loss, objective_of, require_read, step_of
from slime_session.own_numbers import OwnNumbers
from slime_session.reports import OptimizerStepReport
from slime_session.target_batch import TargetBatch, have_targets, predicting
from slime_session.vocabulary import Vocabulary
from slime_training.adapters.drivers import AdapterHolder

PromptLike: TypeAlias = str | Sequence[Mapping[str, Any]] | Prompt
"""Text, or messages of a chat, rendered as the input of a row of data is; or a prompt."""


class OwnLoop:
    def __init__(self, session: Session, renderer: Renderer | None) -> None:
        """`renderer`: of the run's data; None: the run has none."""
        self.session = session
        self._renderer = renderer
        self._vocabulary = Vocabulary.of(session.run)
        self._rollouts = RolloutPrefetcher(session)
        self._saver = CheckpointSaver(session)
        self._rollouts.restore(session.kept_ahead)
        self._accumulated: dict[str, RoleTask] = {}
        """Roles with gradients that no optimizer step has taken."""
        self._stepped: dict[str, list[RoleReport]] = {}
        """Optimizer steps of this rollout step, by role."""
        self._batch: LearnerBatch | None = None
        """The last one that gradients were computed for."""
        self._lost = False
        """An error or interrupt left the trainers inside an optimizer step."""
        self._replaced = False
        """The trainers' state is another one than that of the step's checkpoint, if there is one."""
        self._training_s = 0.0
        self._transport = session.transport
        """The run's; see `TrainerStates.load_weights`."""
        self._numbers = OwnNumbers()
        self.weights = EngineWeights(session)

    async def collect(self) -> list[SampleGroup]:
        await self.between_steps("collect")
        self.weights.require_whole("collect")
        session, config = self.session, self.session.run.config
        step = session.state.rollout_id
        if step >= session.num_rollout:
            raise RolloutsExhausted(
                f"collect: all {session.num_rollout} rollout steps of this run are trained. Open it with a larger "
                "train.num_rollout, or call sample, which has no limit."
            )
        if not self._rollouts.has_started:
            # Groups that were collected and never trained count for no step.
            session.state = replace(session.state, next_collect=step)
        ahead = step + config.rollout.max_async_level
        with session.times.of("rollout"):
            self._rollouts.start_through(ahead if self._rollouts.pooled else step)
            groups = await self._rollouts.next_groups()
            self._rollouts.start_through(ahead)
        return groups

    async def sample(
        self, prompts: int | Sequence[PromptLike] | None, n_samples: int | None, snapshot: SnapshotClient | None = None
    ) -> list[SampleGroup]:
        """`snapshot`: what to sample with; None: the engines' weights."""
        self._require_state()
        self.weights.require_whole("sample")
        session = self.session
        # Engines keep their weights while gradients add up, unless they and the trainers take turns on the same devices.
        if self._accumulated and session.colocation.offloads:
            await self.between_steps("sample")
        await self._end_step()
        if session.runner is None:
            raise ConfigError("sample: this run has no engine, since its collector needs none.")
        if prompts is None or isinstance(prompts, int):
            scope = session.runner.settings.scope
            items = drawn_items(session, session.run.config.rollout.rollout_batch_size if prompts is None else prompts)
        else:
            items = []
            adapter = None if snapshot is None else snapshot.held.adapter
            scope, first = self._numbers.next_prompts(session.state.rollout_id, adapter, len(prompts))
            own = rendered(session, self._renderer, prompts, first)
        runner = own_runner(session.runner, scope, n_samples, snapshot)
        running: list[RunningGroup] = []
        with session.times.of("rollout"):
            try:
                await session.colocation.rollout()
                if items:
                    running += [runner.start(item.prompt, item.samples) for item in items]
                else:
                    running += [runner.start(prompt) for prompt in own]
                return await all_or_aborted([group.task for group in running], lambda: runner.abort(running))
            except BaseException:
                session.buffer.add_samples(item.as_returned(session.state.rollout_id) for item in items)
                raise

    async def score(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        runner = self.session.runner
        if runner is None or runner.settings.scoring is None:
            raise ConfigError(
                "score: this run names no reward. Pass a function of a sample, or set reward in the run file."
            )
        return await all_or_none([asyncio.create_task(runner.score(group)) for group in groups])

    async def credit(self, groups: Sequence[SampleGroup], columns: TokenColumns | None = None) -> LearnerBatch:
        learner = learner_of(self.session)
        self._require_state()
        require_own_numbers(groups)
        await self._end_step()
        session, most = self.session, self.session.run.rollouts_per_batch
        rollouts = len({sample.rollout_id for group in groups for sample in group.samples})
        if not rollouts and session.run.config.train.load_debug_train_data is None:
            raise RolloutError("credit: no samples.")
        if rollouts > most:
            raise RolloutError(
                f"credit: {rollouts} rollouts, and a batch of this run has at most {most} (rollout.rollout_batch_size x "
                "n_samples_per_prompt): credit fewer groups, or set a larger rollout_batch_size."
            )
        state = session.state
        with session.times.of("train"):
            async with session.colocation.train():
                return await learner.credit(state.rollout_id, groups, state.version, columns, may_be_short=True)

    async def batch(self, datums: Sequence[Datum]) -> LearnerBatch:
        for place, datum in enumerate(datums):
            self._vocabulary.require(np.asarray(datum.tokens), f"datums[{place}].tokens")
            if datum.targets is not None:
                self._vocabulary.require(datum.targets.ravel(), f"datums[{place}].targets")
        predicts = have_targets(self.session, datums)
        groups = groups_of(datums, first=self._numbers.next_of_step(self.session.state.rollout_id, len(datums)))
        batch = await self.credit(groups, columns_of(datums))
        return TargetBatch.of(batch) if predicts else batch

    async def forward(self, batch: LearnerBatch) -> Float32:
        session = self.session
        policy = session.policy
        async with session.colocation.train(), policy.turn(), predicting(session, batch):
            scores = await policy.score(batch.dispatches[session.run.roles[0].name])
        return scores["log_probs"]

    async def train(self, batch: LearnerBatch) -> TrainReport:
        require_own_weights(self.session.run, "train")
        await self.between_steps("train")
        require_read(batch)
        self._require_old_log_probs("train", batch)
        async with self._training(), predicting(self.session, batch):
            report = await learner_of(self.session).steps(batch)
        return self._count(report)

    async def forward_backward(self, batch: LearnerBatch, step: int | None, loss: Loss | None) -> Gradients:
        require_own_weights(self.session.run, "forward_backward")
        learner, number = learner_of(self.session), step_of(batch, step)
        other = objective_of(self.session.run, loss, batch)
        if other is None:
            self._require_old_log_probs("forward_backward", batch)
        tasks = batch.tasks if other is None else batch.tasks[:1]
        require_gradients_kept(tasks)
        self._require_state()
        async with self._training(), predicting(self.session, batch):
            began = time.perf_counter()
            gradients = await learner.forward_backward(batch, number, other)
            self._training_s += time.perf_counter() - began
        self._accumulated |= {task.plan.name: task for task in tasks}
        self._batch = batch
        return gradients

    async def optim_step(self, settings: StepSettings) -> OptimizerStepReport:
        require_own_weights(self.session.run, "optim_step")
        if not self._accumulated:
            raise TrainingError("optim_step without gradients: call forward_backward first.")
        tasks, self._accumulated = [*self._accumulated.values()], {}
        taken = max((len(steps) for steps in self._stepped.values()), default=0)
        async with self._training():
            began = time.perf_counter()
            trained = await learner_of(self.session).optim_step(tasks, settings)
            self._training_s += time.perf_counter() - began
        for role in trained:
            self._stepped.setdefault(role.plan.name, []).append(role)
        return report_of(trained, self.session.state.optimizer_steps + taken)

    async def update_weights(self) -> WeightUpdateReport | None:
        await self.between_steps("update_weights")
        if not self._rollouts.in_flight:
            await self._rollouts.wait_idle()
        self.session.transport = self._transport
        with self.session.times.of("update_weights"):
            await self.weights.update()
        return self.session.weight_update_report

    async def ready_for_weights(self, call: str) -> None:
        """Before engines get other weights than the trainers'."""
        self._require_state()
        if self._accumulated and self.session.colocation.offloads:
            await self.between_steps(call)
        if not self._rollouts.in_flight:
            await self._rollouts.wait_idle()

    @contextlib.asynccontextmanager
    async def beginning_again(self) -> AsyncIterator[TrainGroup]:
        """Around what replaces the trainers' whole state, also one that an error left unknown. Gradients are dropped."""
        if not self._lost:
            self._accumulated = {}
            await self._end_step()
        self._accumulated, self._stepped = {}, {}
        session = self.session
        self._lost = self._replaced = True
        async with session.colocation.train(), session.policy.turn():
            yield session.policy
        self._lost = False
        # The trainers' weights are a policy version again.
        session.optimizer_idle.set()

    async def evaluate(self) -> EvalReport:
        await self.between_steps("evaluate")
        self.weights.require_whole("evaluate")
        session = self.session
        if not len(session.evaluator):
            raise ConfigError("evaluate: this run has no evaluation set; add one to eval.datasets.")
        await session.evaluate(session.state.rollout_id - 1)
        await session.evaluated()
        assert session.last_eval is not None
        return session.last_eval

    async def save(self) -> Path:
        require_own_weights(self.session.run, "save")
        await self.between_steps("save")
        session = self.session
        step = session.state.rollout_id
        if self._replaced or step not in session.store.steps():
            ahead = await self._rollouts.quiesce()
            session.state = replace(session.state, next_collect=step + len(ahead))
            with session.times.of("save"):
                await self._saver.save(ahead)
        await self._saver.completed()
        self._replaced = False
        return session.folder.checkpoints / f"step_{step}"

    async def export(self) -> Path:
        require_own_weights(self.session.run, "export")
        await self.between_steps("export")
        await export_hf(self.session)
        return self.session.folder.hf

    async def close(self) -> None:
        """Ends what is under way. A rollout step that has ended is reported; nothing is saved."""
        if not self._lost and not self._accumulated:
            await self._end_step()
        await self._rollouts.cancel_pending()
        await self.session.end_evaluation()
        await self._saver.give_up()

    @contextlib.asynccontextmanager
    async def _training(self) -> AsyncIterator[None]:
        """Around what changes gradients or weights."""
        self._require_state()
        self._lost = True
        with self.session.times.of("train"):
            async with self.session.colocation.train():
                yield
        self._lost = False

    def _require_old_log_probs(self, call: str, batch: LearnerBatch) -> None:
        """ConfigError where the recipe takes the current log-probs as the old ones, and the weights have changed since the
        batch was credited."""
        policy = self.session.run.roles[0]
        if not policy.terms.old_from_current or batch.columns.old_log_probs is not None:
            return
        if batch.version != self.session.state.version or policy.plan.name in self._stepped:
            raise ConfigError(
                f"{call}: the weights have changed since this batch was credited, and with one optimizer step for a rollout "
                "batch the recipe takes the current log-probs as the old ones. Credit the groups again; or pass what forward "
                "gave before, credit(groups, replace(batch.columns, old_log_probs=...)); or set algo.use_rollout_logprobs."
            )

    def _require_state(self) -> None:
        if self._lost:
            raise TrainingError(
                "an error or an interrupt left the trainers inside an optimizer step. Close this session and open it again: it "
                "continues from the last checkpoint."
            )

    async def between_steps(self, call: str) -> None:
        """Ends the rollout step. TrainingError inside an optimizer step: trainers keep no gradients while they are saved,
        exported or offloaded."""
        self._require_state()
        if self._accumulated:
            raise TrainingError(f"{call} between forward_backward and optim_step: call optim_step first.")
        await self._end_step()

    async def _end_step(self) -> None:
        """Counts and reports the optimizer steps since the last rollout step, if there were any."""
        if not self._stepped or self._accumulated:
            return
        assert self._batch is not None
        trained = [joined(steps) for steps in self._stepped.values()]
        async with self.session.colocation.train():
            report = await learner_of(self.session).end_step(self._batch, trained, self._training_s)
        # Not before: if this was interrupted, the next call ends the step.
        self._stepped = {}
        self._count(report)
        await self._saver.keep_schedule()

    def _count(self, report: TrainReport) -> TrainReport:
        session = self.session
        report = replace(report, version=session.state.version + 1)
        self._training_s = 0.0
        self._numbers.step_ended()
        session.advance(session.state.rollout_id, report)
        following = max(session.state.next_collect, session.state.rollout_id)
        session.state = replace(session.state, next_collect=following)
        if report.stuck is not None:
            raise TrainingError(report.stuck)
        return report


def report_of(trained: Sequence[RoleReport], step: int) -> OptimizerStepReport:
    """`step`: its number. Roles report in the opposite order."""
    (metrics,) = join_steps([], trained)
    own = trained[-1].steps[0]
    return OptimizerStepReport(
        step=step,
        lr=own["lr-pg_0"],
        grad_norm=own["grad_norm"],
        skipped=bool(own["skipped_steps"]),
        metrics=metrics,
    )


def own_runner(runner: GroupRunner, scope: str, n_samples: int | None, snapshot: SnapshotClient | None) -> GroupRunner:
    """Without rewards."""
    settings = replace(
        runner.settings,
        scope=scope,
        scoring=None,
        num_samples=runner.settings.num_samples if n_samples is None else n_samples,
        adapter=None if snapshot is None else snapshot.held.name,
    )
    client = runner.client if snapshot is None else cast("EngineClient", snapshot)
    return replace(runner, settings=settings, rewards=None, client=client)


def require_gradients_kept(tasks: Sequence[RoleTask]) -> None:
    """ConfigError for roles that are offloaded between two calls."""
    if len(tasks) > 1 and any(task.trainers.devices.offload for task in tasks):
        raise ConfigError(
            "forward_backward: roles that take turns on the same devices keep no gradients between two calls. Call "
            "train(batch), or pass --no-offload-train."
        )


def require_own_numbers(groups: Sequence[SampleGroup]) -> None:
    """RolloutError where two prompts share the number of a rollout: they would count as one, with the weight of one."""
    group_of: dict[int, int] = {}
    for group in groups:
        for sample in group.samples:
            if group_of.setdefault(sample.rollout_id, sample.group_index) != sample.group_index:
                raise RolloutError(
                    f"credit: groups {group_of[sample.rollout_id]} and {sample.group_index} both have a rollout "
                    f"{sample.rollout_id}, because they were sampled with different n_samples. Credit them one by one."
                )


def require_own_weights(run: BoundRun, call: str) -> None:
    """ConfigError for a base that is frozen, whose adapters are trained and saved one by one."""
    driver, config = run.backend.driver, run.backend.config
    if issubclass(driver, AdapterHolder) and driver.max_adapters(config):
        raise ConfigError(
            f"{call}: this run's weights are frozen, and adapters are trained over them (backend.max_adapters). Call it of "
            "an adapter (session.add_adapter), or leave backend.max_adapters out."
        )


def joined(steps: Sequence[RoleReport]) -> RoleReport:
    """Several optimizer steps of one role as one report."""
    return replace(
        steps[0],
        steps=[metrics for role in steps for metrics in role.steps],
        seconds=sum(role.seconds for role in steps),
    )


def scored_by(groups: Sequence[SampleGroup], reward: Callable[[Sample], float]) -> list[SampleGroup]:
    """With the function's numbers as rewards of samples that have none."""

    def scored(sample: Sample) -> Sample:
        return replace(sample, reward=float(reward(sample))) if is_scored(sample) else sample

    return [replace(group, samples=tuple(map(scored, group.samples))) for group in groups]


async def begin_loop(session: Session, renderer: Renderer | None) -> OwnLoop:
    """With the trainers' weights in the engines."""
    await session.update_weights()
    session.begin_steps()
    return OwnLoop(session, renderer)


def learner_of(session: Session) -> Learner:
    learner = session.learner
    if not isinstance(learner, Learner):
        raise ConfigError("rollout.debug_rollout_only: this run has no trainers.")
    return learner


def drawn_items(session: Session, number: int) -> list[BufferItem]:
    items = session.buffer.get_samples(number, version=session.state.version, max_staleness=session.run.max_staleness)
    if not items:
        raise RolloutsExhausted(f"sample: the data has ended; {number} prompts were asked for.")
    return items


def rendered(session: Session, renderer: Renderer | None, prompts: Sequence[PromptLike], first: int) -> list[Prompt]:
    """Numbered from `first`. ConfigError where the run has no renderer for them, DataError for one that cannot be rendered."""
    data = session.run.config.data
    found = []
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, Prompt):
            found.append(replace(prompt, group_index=first + place))
            continue
        where = f"prompts[{place}]"
        if renderer is None:
            raise ConfigError(f"{where}: this run reads no prompts, so it has no renderer: pass a Prompt.")
        row: dict[str, Any] = {data.input_key: prompt if isinstance(prompt, str) else list(prompt)}
        if data.label_key is not None:
            row[data.label_key] = None
        with foreign(renderer, f"render of {where}"):
            found.append(renderer.render(row, group_index=first + place, origin=where))
    return found
