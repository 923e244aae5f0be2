"""TrainGroup: all ranks of a trained role. Sends each data-parallel rank its shard and joins the results."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.micro_batches import MicroBatchLimits, StepPlan, plan_step
from slime_core.contracts.backend import ACTOR, Layout
from slime_core.contracts.optimizer import StepSettings
from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SentReport
from slime_core.types.batch import Batch, Float32, Int64, TokenColumns
from slime_core.types.report import StepReport
from slime_core.workers.devices import Devices
from slime_core.workers.launcher import Launcher, RankHandle
from slime_core.workers.objective import OtherObjective
from slime_core.workers.recorded_objective import Gradients

WORTH_SHARING: Final = 0.05
"""Part of a batch's tokens that are prompts of an earlier sample."""
ASKED_AGAIN_S: Final = 0.1
"""Seconds between two checks whether a checkpoint is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLimits:
    """Micro-batch sizes, for training and for forwards without gradient."""

    train: MicroBatchLimits
    score: MicroBatchLimits
    balance: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """One data-parallel rank's part of a batch. `samples` are numbers into the batch, ordered by step and micro-batch;
    the micro-batches below are numbers into the shard."""

    samples: Int64
    steps: tuple[tuple[Int64, ...], ...]
    scoring: tuple[Int64, ...]
    shared: Any
    """The shard's columns, as returned by `Launcher.share`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dispatch:
    """A batch that is scored and trained: its tokens were sent to the ranks once."""

    batch: Batch
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSteps:
    """The optimizer steps of one batch."""

    metrics: Sequence[Mapping[str, float]]
    """Of each step, over all ranks."""
    nonfinite: str | None
    """See `StepReport.nonfinite`; the last step left it."""


@dataclass(eq=False, repr=False)
class TrainGroup:
    """A role on the driver's side. Methods that make its ranks compute are called within `turn`."""

    launcher: Launcher
    ranks: Sequence[RankHandle]
    layouts: Sequence[Layout]
    _: KW_ONLY
    limits: TrainerLimits
    shape: ModelShape
    devices: Devices = field(default_factory=Devices)
    """May be shared with other roles."""

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Inside, this role has the devices."""
        return self.devices.turn(self)

    async def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of every rank at once."""
        # The first failure is raised at once: the other ranks may then wait for ever in a collective.
        return await asyncio.gather(*(rank.call(method, *args, **kwargs) for rank in self.ranks))

    def dispatch(self, batch: Batch, step_of_sample: Int64) -> Dispatch:
        """Plans the batch and shares each data-parallel rank's columns, once."""
        dp_size = self.layouts[0].dp_size
        prompts = repeated_prompts(batch) if self.layouts[0].shares_prompts else None
        chosen = [np.flatnonzero(step_of_sample == step) for step in range(int(step_of_sample.max()) + 1)]
        plans = [self._plan(batch, of_step, prompts, dp_size, self.limits.train) for of_step in chosen]
        samples = [np.concatenate([plan.samples_of(rank) for plan in plans]) for rank in range(dp_size)]
        of_rank: list[tuple[tuple[Int64, ...], ...]] = []
        for rank in range(dp_size):
            start = 0
            steps = []
            for plan in plans:
                micros = []
                for micro in plan.ranks[rank]:
                    micros.append(np.arange(start, start + len(micro)))
                    start += len(micro)
                steps.append(tuple(micros))
            of_rank.append(tuple(steps))
        scoring = self._scoring_plans(batch, samples, of_rank, prompts)
        shards = [
            Shard(samples=own, steps=of_steps, scoring=forwards, shared=self.launcher.share(batch.take(own)))
            for own, of_steps, forwards in zip(samples, of_rank, scoring, strict=True)
        ]
        return Dispatch(batch=batch, shards=tuple(shards))

    def _plan(
        self, batch: Batch, samples: Int64, prompts: Int64 | None, dp_size: int, limits: MicroBatchLimits
    ) -> StepPlan:
        return plan_step(
            samples,
            batch.total_length.astype(np.int64),
            dp_size=dp_size,
            limits=limits,
            shape=self.shape,
            balance=self.limits.balance,
            prompts=prompts,
        )

    def forward_tflop(self, batch: Batch) -> float:
        """10^12 floating-point operations of one forward over the batch, of each of the role's ranks."""
        return float(self.shape.forward_flops(batch.total_length).sum()) / len(self.ranks) / 1e12

    async def score(self, dispatch: Dispatch, *, weights: str = ACTOR, entropy: bool = False) -> Mapping[str, Float32]:
        """Columns over the batch's response tokens, in the batch's order."""
        responses = await asyncio.gather(
            *(
                rank.call("forward_only", shard.shared, shard.scoring, weights=weights, entropy=entropy)
                for rank, shard in self._with_shards(dispatch)
            )
        )
        return self._columns(dispatch, responses)

    def _columns(self, dispatch: Dispatch, responses: Sequence[Mapping[str, Float32]]) -> Mapping[str, Float32]:
        columns: dict[str, Float32] = {}
        for layout, response in zip(self.layouts, responses, strict=True):
            if not layout.reports:
                continue
            rows = dispatch.batch.response_rows(dispatch.shards[layout.dp_rank].samples)
            for name, values in response.items():
                column = columns.setdefault(name, np.full(len(dispatch.batch.mask), np.nan, np.float32))
                held = ~np.isnan(values) if layout.cp_size > 1 else slice(None)
                column[rows[held]] = values[held]
        return columns

    async def train(self, dispatch: Dispatch, columns: TokenColumns, rollout_id: int) -> TrainedSteps:
        """One optimizer step after the other."""
        shared = self._share(dispatch, columns)
        reports: list[list[StepReport]] = await asyncio.gather(
            *(
                rank.call("train", shard.shared, shared[layout.dp_rank], shard.steps, rollout_id)
                for (rank, shard), layout in zip(self._with_shards(dispatch), self.layouts, strict=True)
            )
        )
        return self._joined(reports)

    async def forward_backward(
        self, dispatch: Dispatch, columns: TokenColumns, step: int, rollout_id: int, other: OtherObjective | None = None
    ) -> Gradients:
        """Adds the gradients of one optimizer step's micro-batches on every rank. `other`: see `TrainWorker`."""
        shared = self._share(dispatch, columns)
        responses = await asyncio.gather(
            *(
                rank.call(
                    "forward_backward", shard.shared, shared[layout.dp_rank], shard.steps[step], rollout_id, other
                )
                for (rank, shard), layout in zip(self._with_shards(dispatch), self.layouts, strict=True)
            )
        )
        loss = sum(loss for layout, (loss, _) in zip(self.layouts, responses, strict=True) if layout.reports)
        found = self._columns(dispatch, [own for _, own in responses])
        return Gradients(loss, found.get("log_probs", np.full(len(dispatch.batch.mask), np.nan, np.float32)))

    async def optim_step(self, settings: StepSettings = StepSettings()) -> TrainedSteps:
        """One optimizer step with the gradients so far."""
        return self._joined([[report] for report in await self.call_all("optim_step", settings)])

    def _share(self, dispatch: Dispatch, columns: TokenColumns) -> list[Any]:
        """Each shard's rows, as returned by `Launcher.share`."""
        rows = (dispatch.batch.response_rows(shard.samples) for shard in dispatch.shards)
        return [self.launcher.share(columns.take(own)) for own in rows]

    def _joined(self, reports: Sequence[Sequence[StepReport]]) -> TrainedSteps:
        """`reports`: of each rank, of each step."""
        found = (report.nonfinite for of_rank in reports for report in of_rank)
        return TrainedSteps(
            metrics=[self._join(of_step) for of_step in zip(*reports, strict=True)],
            nonfinite=next(filter(None, found), None),
        )

    async def stream_weights(self, version: int, bucket_bytes: int) -> AsyncIterator[Any]:
        """All ranks export together; yields rank 0's buckets, or references to them."""
        others = [asyncio.create_task(drain(rank, version, bucket_bytes)) for rank in self.ranks[1:]]
        async for bucket in self.ranks[0].stream("export_weights", version, bucket_bytes):
            yield bucket
        await asyncio.gather(*others)

    async def send(self, version: int, engines: Sequence[EngineEndpoint]) -> Sequence[SentReport]:
        """Every rank sends its part of the weights to the engines. Returns the reports by rank."""
        return await self.call_all("send_weights", version, engines)

    async def save(self, folder: Path) -> None:
        await self.call_all("save", folder)

    async def stage(self, folder: Path) -> None:
        """Returns when every rank has copied what it saves; the writing continues."""
        await self.call_all("stage", folder)

    async def written(self) -> None:
        """Returns when every rank has written what it staged last. Ranks are asked between their other calls."""
        while True:
            if all(await self.call_all("written")):
                return
            await asyncio.sleep(ASKED_AGAIN_S)

    async def load(self, folder: Path) -> None:
        await self.call_all("load", folder)

    def _with_shards(self, dispatch: Dispatch) -> list[tuple[RankHandle, Shard]]:
        return [(rank, dispatch.shards[layout.dp_rank]) for rank, layout in zip(self.ranks, self.layouts, strict=True)]

    def _scoring_plans(
        self,
        batch: Batch,
        samples: Sequence[Int64],
        steps: Sequence[tuple[tuple[Int64, ...], ...]],
        prompts: Int64 | None,
    ) -> list[tuple[Int64, ...]]:
        """Forwards without gradient, by rank: the micro-batches that are trained; with other limits each rank's own, and empty
        ones that make all ranks' counts equal."""
        limits = self.limits.score
        if limits == self.limits.train:
            return [tuple(itertools.chain.from_iterable(of_rank)) for of_rank in steps]
        planned = []
        for chosen in samples:
            place = np.empty(batch.num_samples, np.int64)
            place[chosen] = np.arange(len(chosen))
            (micros,) = self._plan(batch, np.sort(chosen), prompts, 1, limits).ranks
            planned.append([place[micro] for micro in micros])
        most = max(len(micros) for micros in planned)
        return [(*micros, *[np.empty(0, np.int64)] * (most - len(micros))) for micros in planned]

    def _join(self, reports: Sequence[StepReport]) -> Mapping[str, float]:
        sums: dict[str, float] = {}
        for layout, report in zip(self.layouts, reports, strict=True):
            if layout.reports:
                for name, value in report.sums.items():
                    sums[name] = sums.get(name, 0.0) + value
        first = reports[0]
        if first.split_micro_batches:
            sums["split_micro_batches"] = float(first.split_micro_batches)
        return {
            **sums,
            "grad_norm": first.grad_norm,
            "lr-pg_0": first.lr,
            "skipped_steps": float(any(report.skipped for report in reports)),
        }


def repeated_prompts(batch: Batch) -> Int64 | None:
    """(S,) a number for each prompt; None if so few of the tokens are repeated prompts that sharing them is worth nothing."""
    _, first = np.unique(batch.group_index, return_index=True)
    repeated = int(batch.prompt_length.sum() - batch.prompt_length[first].sum())
    return batch.group_index if repeated > WORTH_SHARING * int(batch.total_length.sum()) else None


async def drain(rank: RankHandle, version: int, bucket_bytes: int) -> None:
    """Lets a rank take part in the gathers of an export; it yields nothing to send."""
    async for _ in rank.stream("export_weights", version, bucket_bytes):
        pass
