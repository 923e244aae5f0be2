"""One role's part in a rollout batch: its forwards and its optimizer steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slime_core.config.roles import CREDIT_COLUMNS, RolePlan, Scoring
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import StepSettings
from slime_core.contracts.setup import RoutingReplay
from slime_core.errors import NonfiniteWeights
from slime_core.rollout.teacher_client import TeacherClient
from slime_core.types.batch import Batch, Float32, Int64, TokenColumns
from slime_core.workers.objective import OtherObjective
from slime_core.workers.recorded_objective import Gradients
from slime_core.workers.train_group import Dispatch, TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleTask:
    """A role's part in one rollout batch."""

    plan: RolePlan
    trainers: TrainGroup
    rollout_id: int

    @property
    def trains(self) -> bool:
        """False in its idle steps."""
        return self.rollout_id >= self.plan.idle_steps

    @property
    def scoring(self) -> list[Scoring]:
        return [scoring for scoring in self.plan.scoring if self.trains or scoring.by_others]

    async def score(self, dispatch: Dispatch) -> tuple[dict[str, Float32], dict[str, float]]:
        """The columns that this role fills, and the seconds that each took."""
        columns: dict[str, Float32] = {}
        seconds: dict[str, float] = {}
        async with self.trainers.turn():
            for scoring in self.scoring:
                began = time.perf_counter()
                scores = await self.trainers.score(dispatch, weights=scoring.weights)
                columns[scoring.column.value] = scores[scoring.output]
                seconds[scoring.column.value] = time.perf_counter() - began
        return columns, seconds

    async def train(self, dispatch: Dispatch, columns: TokenColumns, refresh: bool) -> RoleReport:
        """Takes the optimizer steps; with `refresh` then updates its frozen copies."""
        async with self.trainers.turn():
            began = time.perf_counter()
            trained = await self.trainers.train(dispatch, columns.only(self.plan.columns), self.rollout_id)
            if refresh and trained.nonfinite is None:
                await self._refresh()
            return RoleReport(
                plan=self.plan,
                steps=trained.metrics,
                nonfinite=trained.nonfinite,
                seconds=time.perf_counter() - began,
            )

    async def refresh(self) -> None:
        """Updates its frozen copies."""
        async with self.trainers.turn():
            await self._refresh()

    async def _refresh(self) -> None:
        for name in self.plan.updated_frozen_models:
            await self.trainers.call_all("update_frozen_model", name)

    async def forward_backward(
        self, dispatch: Dispatch, columns: TokenColumns, step: int, other: OtherObjective | None
    ) -> Gradients:
        """Adds the gradients of one optimizer step. `other`: a loss instead of the recipe's."""
        chosen = columns.only(self.plan.columns if other is None else CREDIT_COLUMNS | other.columns)
        async with self.trainers.turn():
            return await self.trainers.forward_backward(dispatch, chosen, step, self.rollout_id, other)

    async def optim_step(self, settings: StepSettings) -> RoleReport:
        async with self.trainers.turn():
            began = time.perf_counter()
            trained = await self.trainers.optim_step(settings)
            seconds = time.perf_counter() - began
            return RoleReport(plan=self.plan, steps=trained.metrics, nonfinite=trained.nonfinite, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleReport:
    """The metrics of one role's training."""

    plan: RolePlan
    steps: Sequence[Mapping[str, float]]
    """Metrics of each optimizer step, without prefix."""
    nonfinite: str | None
    """See `StepReport.nonfinite`."""
    seconds: float


def require_finite(rollout_id: int, trained: Sequence[RoleReport]) -> None:
    """NonfiniteWeights if a step of a role left something that is not finite."""
    for role in trained:
        if role.nonfinite is not None:
            last = role.steps[-1]
            raise NonfiniteWeights(
                f"step {rollout_id}: {role.nonfinite} after optimizer step {len(role.steps)} of the {role.plan.name} "
                f"(learning rate {last['lr-pg_0']:g}, norm of the gradient {last['grad_norm']:g}). These weights are not "
                f"saved, and no engine gets them. Lower --{role.plan.metric_prefix}lr."
            )


def dispatch_to(tasks: Sequence[RoleTask], batch: Batch, step_of_sample: Int64) -> dict[str, Dispatch]:
    """The dispatched batch of every role that scores or trains it, by the role's name."""
    requested = [task for task in tasks if task.trains or task.scoring]
    plain = replace(batch, routed_experts=None)
    return {
        task.plan.name: task.trainers.dispatch(
            batch if task.plan.routing_replay is RoutingReplay.ROLLOUT else plain, step_of_sample
        )
        for task in requested
    }


async def score_teacher(teacher: TeacherClient, batch: Batch) -> tuple[dict[str, Float32], dict[str, float]]:
    """Like `RoleTask.score`, with the teacher's engines."""
    began = time.perf_counter()
    column = await teacher.log_probs(batch)
    name = Need.TEACHER_LOGPROBS.value
    return {name: column}, {name: time.perf_counter() - began}


def join_steps(
    of_driver: Sequence[Sequence[Mapping[str, float]]], trained: Sequence[RoleReport]
) -> tuple[Mapping[str, float], ...]:
    """Metrics of each optimizer step under the names that trackers see. All roles take equally many steps. `of_driver`:
    what was computed here, several kinds of it."""
    joined: list[dict[str, float]] = [{} for _ in trained[0].steps]
    for kind in of_driver:
        for of_step, metrics in zip(joined, kind, strict=False):
            of_step |= {f"train/{name}": value for name, value in metrics.items()}
    for role in reversed(trained):
        for number, metrics in enumerate(role.steps):
            joined[number] |= {f"train/{role.plan.metric_prefix}{name}": value for name, value in metrics.items()}
    return tuple(joined)
