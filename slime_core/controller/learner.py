"""Learner: accepted groups to a trained batch. Score what the recipe needs, assign credit, take the optimizer steps."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from slime_core.algorithm.advantages import AdvantageConfig, CreditedBatch, compute_advantages_and_returns
from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.learning_signal import no_signal
from slime_core.algorithm.loss_weights import loss_weights, split_steps
from slime_core.algorithm.metrics import METRIC_OF_COLUMN, step_metrics, step_rollout_metrics
from slime_core.algorithm.mismatch import mismatch_metrics
from slime_core.algorithm.nonfinite import mask_samples, name_samples, nonfinite_samples
from slime_core.config.bound import BoundAlgo, BoundRun
from slime_core.config.roles import RolePlan
from slime_core.config.run import DebugConfig
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import StepSettings
from slime_core.contracts.setup import RoutingReplay
from slime_core.controller.role_task import RoleReport, RoleTask, dispatch_to, join_steps, require_finite, score_teacher
from slime_core.data.train_data import read_train_data, train_data_file
from slime_core.errors import RolloutError, TrainingError
from slime_core.rollout.teacher_client import TeacherClient
from slime_core.types.batch import Batch, Float32, Int64, TokenColumns
from slime_core.types.report import TrainReport
from slime_core.types.sample import Sample, SampleGroup
from slime_core.workers.objective import OtherObjective
from slime_core.workers.recorded_objective import Gradients
from slime_core.workers.train_group import Dispatch, TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """The settings of every batch, from the recipe and the run file."""

    roles: tuple[RolePlan, ...]
    """In order of scoring."""
    old_from_rollout: bool
    reads_rollout: bool = False
    """The engine's log-probs are used: they must be there."""
    report_mismatch: bool = False
    """Metrics of the gap between the trainer's log-probs and the engine's."""
    rules: AdvantageConfig
    rollouts_per_batch: int
    train_short_batch: bool
    skip_nonfinite: bool = False
    max_skipped_steps: int
    ref_update_interval: int | None
    recorded: Path | None = None
    """Folder of train data to train on again, instead of what was collected."""
    logged: DebugConfig = field(default_factory=DebugConfig)
    """Optional metrics to log."""

    @classmethod
    def of(cls, run: BoundRun) -> LearnerPlan:
        keys = run.algo.keys
        of_batch = [part.driver for part in run.algo.corrections if not part.driver.in_loss]
        return cls(
            roles=tuple(role.plan for role in run.roles),
            old_from_rollout=run.algo.old_from_rollout(run.steps_per_rollout),
            reads_rollout=keys.get_mismatch_metrics or Need.ROLLOUT_LOGPROBS in run.algo.needs,
            report_mismatch=keys.get_mismatch_metrics
            or any(driver.needs >= {Need.OLD_LOGPROBS, Need.ROLLOUT_LOGPROBS} for driver in of_batch),
            rules=advantage_config(run, run.algo),
            rollouts_per_batch=run.rollouts_per_batch,
            skip_nonfinite=run.config.train.on_nonfinite == "skip",
            train_short_batch=run.config.train.on_short_batch == "train",
            max_skipped_steps=run.config.train.max_skipped_steps,
            ref_update_interval=run.config.train.ref_update_interval,
            recorded=None if (folder := run.config.train.load_debug_train_data) is None else Path(folder),
            logged=run.config.debug,
        )


def advantage_config(run: BoundRun, algo: BoundAlgo) -> AdvantageConfig:
    from slime_core.contracts.aggregation import Aggregation

    keys = algo.keys
    estimators = [(part.build(), frozenset(part.driver.needs)) for part in algo.estimators]
    return AdvantageConfig(
        advantage=estimators[0][0] if estimators else None,
        advantage_needs=estimators[0][1] if estimators else frozenset(),
        advantage_terms=estimators[1:],
        shaping=[part.build() for part in algo.shaping],
        kl_reward=None if algo.kl_reward is None else algo.kl_reward.build(),
        kl_coef=keys.kl_coef,
        normalize_advantages=keys.normalize_advantages,
        corrections=[
            (part.build(), frozenset(part.driver.needs)) for part in algo.corrections if not part.driver.in_loss
        ],
        aggregation=Aggregation.TOKEN_MEAN if keys.calculate_per_token_loss else keys.aggregation,
        rollouts_per_step=run.global_batch_size,
        max_response_len=run.config.rollout.rollout_max_response_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnerBatch:
    """Groups with their credit: what the optimizer steps of a rollout step take."""

    rollout_id: int
    version: int
    """Policy version before its optimizer steps."""
    samples: Sequence[Sample]
    batch: Batch
    credited: CreditedBatch
    step_of_sample: Int64
    """(S,) optimizer step of each sample, also of those that are left out because they are not finite."""
    scores: Mapping[str, Float32]
    """Columns that the roles computed."""
    read: Mapping[str, Float32]
    """The same and the engine's log-probs, if they are the old ones."""
    tasks: Sequence[RoleTask]
    """Roles that it trains, the policy first if it is not idle."""
    dispatches: Mapping[str, Dispatch]
    counts: Mapping[str, float]
    scoring_s: Mapping[str, float]
    """Seconds of each scoring."""
    score_s: float
    """Seconds until all scores were there."""
    seconds: float
    """Seconds until the credit was there."""

    @property
    def columns(self) -> TokenColumns:
        return self.credited.columns

    @property
    def num_steps(self) -> int:
        """Optimizer steps that its samples are divided into."""
        return int(self.step_of_sample.max(initial=-1)) + 1


class Learner:
    """Trains the roles; counts consecutive steps of each that had to be skipped."""

    def __init__(
        self,
        trainers: Mapping[str, TrainGroup],
        plan: LearnerPlan,
        *,
        on_batch: Callable[[int, int, Batch, TokenColumns], None],
        before_steps: Callable[[], None] = lambda: None,
        teacher: TeacherClient | None = None,
    ) -> None:
        """`trainers`: by role. `before_steps`: called before the first optimizer step. `teacher`: one that engines serve."""
        self._teacher = teacher
        self._trainers = trainers
        self._plan = plan
        self._on_batch = on_batch
        self._before_steps = before_steps
        self._skipped_in_a_row: Counter[str] = Counter()

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        """One rollout batch; the report carries version + 1. What is computed over all samples runs in a thread, so that the
        event loop serves the requests in flight."""
        return await self.steps(await self.credit(rollout_id, groups, version))

    async def credit(
        self,
        rollout_id: int,
        groups: Sequence[SampleGroup],
        version: int,
        given: TokenColumns | None = None,
        *,
        may_be_short: bool = False,
    ) -> LearnerBatch:
        """The first half of `train`: scores and advantages. `given`: the batch's columns, instead of the recipe's; loss weights
        that it lacks are the recipe's. `may_be_short`: fewer rollouts than requested are no error."""
        started = time.perf_counter()
        tasks = [
            RoleTask(plan=plan, trainers=self._trainers[plan.name], rollout_id=rollout_id) for plan in self._plan.roles
        ]
        batch, recorded, step_of_sample, dispatches = await asyncio.to_thread(
            self._prepare, rollout_id, groups, tasks, may_be_short
        )
        recorded = recorded if given is None else self._weighted(batch, given, step_of_sample)
        scores, scoring_s = ({}, {}) if recorded is not None else await self._score(tasks, dispatches, batch)
        scored = time.perf_counter()
        counts: dict[str, float] = {}
        if bad := self._nonfinite(batch, scores):
            batch, scores, trained_in = mask_samples(batch, scores, step_of_sample, np.array(list(bad)))
            dispatches = dispatch_to(tasks, batch, trained_in)
            counts["rollout/nonfinite_samples"] = float(len(bad))
        columns = {**scores, Need.OLD_LOGPROBS: batch.rollout_log_probs} if self._plan.old_from_rollout else scores
        training = [task for task in tasks if task.trains]
        if recorded is not None:
            credited = CreditedBatch(columns=recorded, step_of_sample=step_of_sample)
        else:
            credited = await asyncio.to_thread(
                compute_advantages_and_returns, batch, TokenColumns(**columns), self._rules(training)
            )
        self._on_batch(rollout_id, version, batch, credited.columns)
        return LearnerBatch(
            rollout_id=rollout_id,
            version=version,
            samples=[sample for group in groups for sample in group.samples],
            batch=batch,
            credited=credited,
            step_of_sample=step_of_sample,
            scores=scores,
            read={**columns, **scores},
            tasks=training,
            dispatches=dispatches,
            counts=counts,
            scoring_s=scoring_s,
            score_s=scored - started,
            seconds=time.perf_counter() - started,
        )

    async def steps(self, batch: LearnerBatch) -> TrainReport:
        """The second half: all optimizer steps of the batch, for every role that trains."""
        began = time.perf_counter()
        self._before_steps()
        # In the opposite order of scoring: devices that several share are still with the role that was scored last.
        trained = await asyncio.gather(
            *(
                task.train(batch.dispatches[task.plan.name], batch.columns, self._refreshes(batch.rollout_id))
                for task in reversed(batch.tasks)
            )
        )
        seconds = time.perf_counter() - began
        require_finite(batch.rollout_id, trained)
        return await asyncio.to_thread(self.report, batch, trained, seconds)

    async def forward_backward(self, batch: LearnerBatch, step: int, other: OtherObjective | None = None) -> Gradients:
        """Gradients of one optimizer step of the batch, added to those since the last `optim_step`; returns the policy's.
        `other`: a loss instead of the recipe's, for the policy alone."""
        self._before_steps()
        tasks = batch.tasks if other is None else batch.tasks[:1]
        given = [(task, batch.dispatches[task.plan.name]) for task in reversed(tasks)]
        found = (task.forward_backward(dispatch, batch.columns, step, other) for task, dispatch in given)
        return (await asyncio.gather(*found))[-1]

    async def optim_step(self, tasks: Sequence[RoleTask], settings: StepSettings = StepSettings()) -> list[RoleReport]:
        """One optimizer step of these roles. `settings`: the policy's."""
        policy = self._plan.roles[0]
        trained = await asyncio.gather(
            *(task.optim_step(settings if task.plan is policy else StepSettings()) for task in reversed(tasks))
        )
        require_finite(tasks[0].rollout_id, trained)
        return trained

    async def end_step(self, batch: LearnerBatch, trained: Sequence[RoleReport], seconds: float) -> TrainReport:
        """Ends a rollout step whose optimizer steps `optim_step` took, in `seconds`. `trained`: all of each role's."""
        if self._refreshes(batch.rollout_id):
            await asyncio.gather(*(task.refresh() for task in batch.tasks))
        return await asyncio.to_thread(self.report, batch, trained, seconds)

    def report(self, batch: LearnerBatch, trained: Sequence[RoleReport], seconds: float) -> TrainReport:
        """`seconds`: of the optimizer steps."""
        step_of_sample = batch.step_of_sample
        return TrainReport(
            version=batch.version + 1,
            steps=join_steps(
                [
                    step_metrics(batch.batch, step_of_sample),
                    mismatch(self._plan, batch.batch, batch.scores, step_of_sample),
                    batch.credited.step_metrics,
                ],
                trained,
            ),
            rollout={
                **step_rollout_metrics(self._plan.logged, batch.batch, batch.samples, batch.version, batch.read),
                **batch.credited.metrics,
                **batch.counts,
            },
            perf={
                "perf/score_time": batch.score_s,
                "perf/train_time": batch.seconds + seconds,
                **self._speeds(batch.batch, batch.seconds - batch.score_s + seconds, batch.scoring_s, trained),
            },
            no_signal=self._no_signal(batch.batch, batch.columns, trained),
            stuck=self._stuck(trained),
        )

    def _refreshes(self, rollout_id: int) -> bool:
        """Whether frozen copies are updated after this rollout step."""
        interval = self._plan.ref_update_interval
        return interval is not None and (rollout_id + 1) % interval == 0

    def _weighted(self, batch: Batch, columns: TokenColumns, step_of_sample: Int64) -> TokenColumns:
        if columns.loss_weight is not None:
            return columns
        rules = self._plan.rules
        return replace(
            columns, loss_weight=loss_weights(batch, step_of_sample, rules.aggregation, rules.max_response_len)
        )

    def _prepare(
        self, rollout_id: int, groups: Sequence[SampleGroup], tasks: Sequence[RoleTask], may_be_short: bool
    ) -> tuple[Batch, TokenColumns | None, Int64, dict[str, Dispatch]]:
        """The batch, its columns if train data were recorded, the optimizer step of each sample, and what each role gets."""
        recorded: TokenColumns | None = None
        if self._plan.recorded is None:
            batch = build_batch(groups)
        else:
            batch, recorded = read_train_data(train_data_file(self._plan.recorded, rollout_id))
        check_experts(self._plan, batch)
        check_size(self._plan, batch, may_be_short or self._plan.train_short_batch)
        step_of_sample = split_steps(batch, self._plan.rules.rollouts_per_step)
        return batch, recorded, step_of_sample, dispatch_to(tasks, batch, step_of_sample)

    def _speeds(
        self, batch: Batch, training_s: float, scoring_s: Mapping[str, float], trained: Sequence[RoleReport]
    ) -> dict[str, float]:
        """Seconds of each scoring and each role, tokens per second, TFLOP per second and rank."""
        tokens = len(batch.tokens)
        return {
            "perf/train_tokens": float(tokens),
            "perf/train_tok_per_s": tokens / training_s,
            **{f"perf/{METRIC_OF_COLUMN.get(name, name)}_time": seconds for name, seconds in scoring_s.items()},
            **{f"perf/{role.plan.name}_train_time": role.seconds for role in trained},
            **{f"perf/{role.plan.name}_train_tok_per_s": tokens / role.seconds for role in trained},
            **self._tflops(batch, scoring_s, trained),
        }

    async def _score(
        self, tasks: Sequence[RoleTask], dispatches: Mapping[str, Dispatch], batch: Batch
    ) -> tuple[dict[str, Float32], dict[str, float]]:
        """The columns that the roles and the teacher's engines compute at the same time, and the seconds that each took."""
        columns: dict[str, Float32] = {}
        seconds: dict[str, float] = {}
        work = [task.score(dispatches[task.plan.name]) for task in tasks if task.scoring]
        if self._teacher is not None:
            work.append(score_teacher(self._teacher, batch))
        for of_role, took in await asyncio.gather(*work):
            columns |= of_role
            seconds |= took
        return columns, seconds

    def _tflops(self, batch: Batch, scoring_s: Mapping[str, float], trained: Sequence[RoleReport]) -> dict[str, float]:
        """TFLOP per second and rank, counted from the model's shape; backward costs twice what forward does."""
        metrics = {}
        for role in trained:
            forward = self._trainers[role.plan.name].forward_tflop(batch)
            metrics[f"perf/{role.plan.name}_train_tflops"] = 3 * forward / role.seconds
            old = scoring_s.get(Need.OLD_LOGPROBS)
            if old is not None and any(scoring.column is Need.OLD_LOGPROBS for scoring in role.plan.scoring):
                metrics["perf/log_probs_tflops"] = forward / old
        return metrics

    def _nonfinite(self, batch: Batch, scores: Mapping[str, Float32]) -> dict[int, str]:
        """Samples to leave out, with the column that is not finite; TrainingError if none may be left out."""
        read = dict(scores)
        if self._plan.old_from_rollout or self._plan.reads_rollout:
            read["rollout_log_probs"] = batch.rollout_log_probs
        bad = nonfinite_samples(batch, read)
        if bad and not self._plan.skip_nonfinite:
            raise TrainingError(
                f"not finite: {name_samples(batch, bad)}. Pass --on-nonfinite skip to train without such samples. These are "
                f"{len(bad)} of {batch.num_samples} samples: if that is most of them, weights may have diverged: lower --lr."
            )
        return bad

    def _rules(self, training: Sequence[RoleTask]) -> AdvantageConfig:
        """Corrections are computed for roles that read them: an idle policy has no log-probs to correct."""
        if any(task.plan.corrected for task in training):
            return self._plan.rules
        return replace(self._plan.rules, corrections=())

    def _no_signal(self, batch: Batch, columns: TokenColumns, trained: Sequence[RoleReport]) -> str | None:
        """See `TrainReport.no_signal`; None while the policy is idle."""
        policy = (role for role in trained if role.plan is self._plan.roles[0])
        return next((no_signal(batch, columns, role.steps) for role in policy), None)

    def _stuck(self, trained: Sequence[RoleReport]) -> str | None:
        """See `TrainReport.stuck`."""
        for role in trained:
            name = role.plan.name
            for step in role.steps:
                self._skipped_in_a_row[name] = self._skipped_in_a_row[name] + 1 if step["skipped_steps"] else 0
                if self._skipped_in_a_row[name] > self._plan.max_skipped_steps:
                    return (
                        f"{self._skipped_in_a_row[name]} optimizer steps of the {name} in a row had a loss or gradient that "
                        f"is not finite (--max-skipped-steps {self._plan.max_skipped_steps}). Nothing was changed in them, "
                        f"and what was trained before is saved; lower --{role.plan.metric_prefix}lr or look at the rewards."
                    )
        return None


def mismatch(
    plan: LearnerPlan, batch: Batch, scores: Mapping[str, Float32], step_of_sample: Int64
) -> list[Mapping[str, float]]:
    """Mismatch metrics of each optimizer step; empty if the trainer's log-probs were not scored."""
    log_probs = scores.get(Need.OLD_LOGPROBS)
    if log_probs is None or not plan.report_mismatch:
        return []
    if not step_of_sample.any():
        return [mismatch_metrics(batch, log_probs)]
    samples_of_step = [np.flatnonzero(step_of_sample == step) for step in range(int(step_of_sample.max()) + 1)]
    return [
        mismatch_metrics(batch.take(samples), log_probs[batch.response_rows(samples)]) for samples in samples_of_step
    ]


def check_size(plan: LearnerPlan, batch: Batch, may_be_short: bool) -> None:
    rollouts = len(np.unique(batch.rollout_id))
    requested = plan.rollouts_per_batch
    # More rollouts would be another optimizer step, for which the old log-probs are not the current ones.
    if rollouts > requested:
        raise RolloutError(
            f"the batch has {rollouts} rollouts, but {requested} are requested: all samples that a generator makes of "
            "one response must share the rollout_id of its episode."
        )
    if rollouts < requested and not may_be_short:
        raise RolloutError(
            f"the batch has {rollouts} rollouts, but {requested} are requested. Pass --on-short-batch train to train on "
            "what there is."
        )


def check_experts(plan: LearnerPlan, batch: Batch) -> None:
    requested = [role.name for role in plan.roles if role.routing_replay is RoutingReplay.ROLLOUT]
    if requested and batch.routed_experts is None and batch.mask.any():
        raise RolloutError(
            "the batch has no expert ids, and train.use_rollout_routing_replay replays the engine's. Where it comes from a "
            "file, the run that wrote that had to pass --use-rollout-routing-replay too."
        )
