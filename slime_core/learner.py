"""Learner: accepted groups to a trained batch. Score what the recipe needs, assign credit, take the optimiser steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slime_core.batch.assemble import assemble
from slime_core.batch.denominators import split_steps
from slime_core.config.bound import BoundAlgo, BoundRun
from slime_core.contracts.backend import ACTOR, REFERENCE
from slime_core.contracts.needs import Need
from slime_core.errors import RolloutError, TrainingError
from slime_core.launch.trainers import Dispatch, Trainers
from slime_core.metrics import column_metrics, reward_part_metrics, rollout_metrics
from slime_core.objective.credit import CreditRules, assign_credit, require_finite
from slime_core.types.batch import Batch, Float32, TokenColumns
from slime_core.types.report import TrainReport
from slime_core.types.sample import SampleGroup

METRIC_OF_COLUMN: Final = {"old_log_probs": "log_probs"}
"""Columns whose metric has another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """What the recipe asks of every batch; worked out once."""

    score_old: bool
    """A forward for the old log-probs (they are not provably the current ones)."""
    old_from_rollout: bool
    score_reference: bool
    rules: CreditRules
    rollouts_per_batch: int
    train_short_batch: bool
    max_skipped_steps: int
    ref_update_interval: int | None

    @classmethod
    def of(cls, run: BoundRun) -> LearnerPlan:
        algo, keys = run.algo, run.algo.keys
        wants_old = Need.OLD_LOGPROBS in algo.needs or keys.get_mismatch_metrics
        return cls(
            score_old=wants_old and not keys.use_rollout_logprobs and not algo.old_is_current(run.steps_per_rollout),
            old_from_rollout=keys.use_rollout_logprobs,
            score_reference=Need.REF_LOGPROBS in algo.needs,
            rules=credit_rules(run, algo),
            rollouts_per_batch=run.rollouts_per_batch,
            train_short_batch=run.config.train.on_short_batch == "train",
            max_skipped_steps=run.config.train.max_skipped_steps,
            ref_update_interval=run.config.train.ref_update_interval,
        )


def credit_rules(run: BoundRun, algo: BoundAlgo) -> CreditRules:
    from slime_core.contracts.aggregation import Aggregation

    keys = algo.keys
    return CreditRules(
        advantage=algo.advantage.build() if algo.loss.driver.uses_advantages else None,
        advantage_needs=frozenset(algo.advantage.driver.needs),
        shaping=[part.build() for part in algo.shaping],
        kl_reward=None if algo.kl_reward is None else algo.kl_reward.build(),
        kl_coef=keys.kl_coef,
        normalize_advantages=keys.normalize_advantages,
        corrections=[part.build() for part in algo.corrections if not part.driver.in_loss],
        aggregation=Aggregation.TOKEN_MEAN if keys.calculate_per_token_loss else keys.aggregation,
        rollouts_per_step=run.global_batch_size,
        max_response_len=run.config.rollout.rollout_max_response_len,
    )


class Learner:
    """Trains the actor; counts consecutive steps that had to be skipped."""

    def __init__(
        self, trainers: Trainers, plan: LearnerPlan, *, on_batch: Callable[[int, int, Batch, TokenColumns], None]
    ) -> None:
        self._trainers = trainers
        self._plan = plan
        self._on_batch = on_batch
        self._skipped_in_a_row = 0

    async def train(self, rollout_id: int, groups: Sequence[SampleGroup], version: int) -> TrainReport:
        """One rollout batch; the report carries version + 1."""
        started = time.perf_counter()
        batch = assemble(groups)
        self._check_size(batch)
        dispatch = self._trainers.dispatch(batch, split_steps(batch, self._plan.rules.rollouts_per_step))
        scores = await self._score(dispatch)
        scored = time.perf_counter()
        credited = assign_credit(batch, TokenColumns(**scores), self._plan.rules)
        self._on_batch(rollout_id, version, batch, credited.columns)
        steps = await self._trainers.train(dispatch, credited.columns)
        self._check_skipped(steps)
        interval = self._plan.ref_update_interval
        if interval is not None and self._plan.score_reference and (rollout_id + 1) % interval == 0:
            await self._trainers.each("refresh_copy", REFERENCE)
        ended = time.perf_counter()
        samples = [sample for group in groups for sample in group.samples]
        trained_tokens = len(batch.tokens)
        return TrainReport(
            version=version + 1,
            steps=tuple(
                {f"train/{name}": value for name, value in {**of_credit, **step}.items()}
                for of_credit, step in zip(credited.step_metrics, steps, strict=True)
            ),
            rollout={
                **rollout_metrics(batch, version),
                **column_metrics(batch, {METRIC_OF_COLUMN.get(name, name): column for name, column in scores.items()}),
                **reward_part_metrics(samples, "rollout/reward_part"),
                **credited.metrics,
            },
            perf={
                "perf/log_probs_time": scored - started,
                "perf/actor_train_time": ended - scored,
                "perf/train_time": ended - started,
                "perf/train_tokens": float(trained_tokens),
                "perf/actor_train_tok_per_s": trained_tokens / (ended - scored),
            },
        )

    async def _score(self, dispatch: Dispatch) -> dict[str, Float32]:
        batch, columns = dispatch.batch, {}
        if self._plan.score_old:
            columns["old_log_probs"] = (await self._trainers.score(dispatch, weights=ACTOR))["log_probs"]
        elif self._plan.old_from_rollout:
            columns["old_log_probs"] = batch.rollout_log_probs
        if self._plan.score_reference:
            columns["ref_log_probs"] = (await self._trainers.score(dispatch, weights=REFERENCE))["log_probs"]
        for name, column in columns.items():
            require_finite(name, column, batch)
        return columns

    def _check_size(self, batch: Batch) -> None:
        rollouts = len(np.unique(batch.rollout_id))
        wanted = self._plan.rollouts_per_batch
        # More would not be harmless: another optimiser step, for which the old log-probs are not the current ones.
        if rollouts > wanted:
            raise RolloutError(
                f"the batch has {rollouts} rollouts, but {wanted} were asked for: what a generator makes of one answer "
                "must share the rollout_id of its episode."
            )
        if rollouts < wanted and not self._plan.train_short_batch:
            raise RolloutError(
                f"the batch has {rollouts} rollouts, but {wanted} are wanted. Say --on-short-batch train to train on "
                "what there is."
            )

    def _check_skipped(self, steps: Sequence[Mapping[str, float]]) -> None:
        for step in steps:
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if step["skipped_steps"] else 0
            if self._skipped_in_a_row > self._plan.max_skipped_steps:
                raise TrainingError(
                    f"{self._skipped_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
                    f"(--max-skipped-steps {self._plan.max_skipped_steps}). Nothing was changed in them; lower --lr or "
                    "look at the rewards."
                )
