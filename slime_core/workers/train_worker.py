"""TrainWorker: one rank of a trained role. Packs its shard into micro-batches and forwards to the backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.config.part import PluginSpec
from slime_core.contracts.backend import ACTOR, Layout, Objective, Scores, TrainBackend
from slime_core.contracts.media import Media, MediaPacker
from slime_core.contracts.optimizer import ChosenOptimizer, StepSettings
from slime_core.contracts.setup import EngineEndpoint, TrainerSetup
from slime_core.contracts.transport import SenderSetup, SentReport, WeightSender
from slime_core.errors import EngineError
from slime_core.types.batch import Batch, Float32, Int64, TokenColumns
from slime_core.types.microbatch import MicroBatch
from slime_core.types.report import StepReport
from slime_core.types.weights import Bucket
from slime_core.workers.agreement import Agreement
from slime_core.workers.buckets import buckets_of
from slime_core.workers.engine_format import EngineFormat, converted
from slime_core.workers.micro_batch_memory import SCORING, TRAINING, MicroBatchMemory
from slime_core.workers.objective import ObjectiveSpec, OtherObjective
from slime_core.workers.profile import Profile, ProfilePlan
from slime_core.workers.recorded_objective import RecordedObjective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWorkerSpec:
    """Everything that a rank is started with; plain data."""

    agreement: Agreement
    backend: PluginSpec
    objective: ObjectiveSpec
    setup: TrainerSetup
    optimizer: PluginSpec | None = None
    """None: see `TrainerSetup.chosen_optimizer`."""
    temperature: float
    profile: ProfilePlan = field(default_factory=lambda: ProfilePlan(folder=Path()))
    transport: PluginSpec | None = None
    """Weight transport, for the role whose weights the engines get."""
    engine_format: EngineFormat | None = None
    """The engines' format; None: the trainer's."""
    sender: SenderSetup | None = None
    media: PluginSpec | None = None
    """A modality of the run, whose driver builds what serves all of them."""


class TrainWorker:
    """See `slime_core.contracts.backend` for the calling order."""

    def __init__(self, spec: TrainWorkerSpec) -> None:
        self._spec = spec
        self._profile = Profile(spec.profile, role=spec.setup.role, rank=spec.setup.rank)
        registry = spec.agreement.registry()
        self._backend: TrainBackend = spec.agreement.resolve(spec.backend, registry).build()
        self._objective: Objective = spec.objective.build(spec.agreement, registry)
        setup = spec.setup
        if spec.optimizer is not None:
            optimizer = spec.agreement.resolve(spec.optimizer, registry)
            chosen = ChosenOptimizer(driver=optimizer.driver, options=optimizer.config)
            setup = replace(setup, chosen_optimizer=chosen)
        self._setup = setup
        self._pixels: MediaPacker | None = None
        if spec.media is not None:
            media: Media = spec.agreement.resolve(spec.media, registry).build()
            self._pixels = media.packer(setup.model_path, trust_remote_code=setup.trust_remote_code)
        self._sender: WeightSender | None = None
        self._sends_adapter = False
        if spec.transport is not None:
            transport = spec.agreement.resolve(spec.transport, registry)
            self._sender = transport.driver.build_sender(transport.config)
            self._sends_adapter = transport.driver.sends_adapters
        self._format = None if spec.engine_format is None else spec.engine_format.build(spec.agreement, registry)
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=use_device, initargs=(setup,))
        self._writing: Future[None] | None = None
        self._memory = MicroBatchMemory(alone=setup.world_size == 1)
        self._other: tuple[OtherObjective, Objective] | None = None
        self._rollout_id: int | None = None
        """Of the last `forward_backward`."""
        self._has_gradients = False

    def setup(self) -> Layout:
        layout = self._backend.setup(self._setup)
        if self._sender is not None and self._spec.sender is not None:
            frozen = self._backend.frozen_tensors()
            if self._format is not None:
                frozen = frozenset(name for own in frozen for name in self._format.names(own))
            config = self._backend.adapter_config() if self._sends_adapter else None
            self._sender.setup(replace(self._spec.sender, frozen=frozen, adapter_config=config))
        return layout

    def forward_only(
        self, shard: Batch, micros: Sequence[Int64], weights: str = ACTOR, entropy: bool = False
    ) -> Mapping[str, Float32]:
        """Columns over the shard's response tokens, NaN where another context-parallel rank holds the token."""
        score = partial(self._backend.forward_only, weights=weights, entropy=entropy)
        with self._profile.around("train_log_probs"):
            scored, micros = self._memory.fit(
                score, partial(self._packed, shard, None), micros, shard.total_length, SCORING
            )
        return columns_of(shard, micros, scored)

    def train(
        self, shard: Batch, columns: TokenColumns, steps: Sequence[Sequence[Int64]], rollout_id: int
    ) -> list[StepReport]:
        """One optimizer step for each entry of `steps`, which lists the samples of its micro-batches; none after one that left
        something that is not finite, on any rank."""
        step, pack = partial(self._backend.train_step, objective=self._objective), partial(self._packed, shard, columns)
        reports = []
        self._backend.begin_rollout(rollout_id)
        with self._profile.around("train_actor"):
            for micros in steps:
                report, _ = self._memory.fit(step, pack, micros, shard.total_length, TRAINING)
                reports.append(replace(report, split_micro_batches=self._memory.take_splits()))
                if report.nonfinite is not None:
                    break
        return reports

    def forward_backward(
        self,
        shard: Batch,
        columns: TokenColumns,
        micros: Sequence[Int64],
        rollout_id: int,
        other: OtherObjective | None = None,
    ) -> tuple[float, Mapping[str, Float32]]:
        """Adds the gradients of these micro-batches to those since the last `optim_step`, and returns their loss and columns as
        `forward_only` does. `other`: instead of the run's."""
        objective = self._objective
        if other is not None:
            if self._other is None or self._other[0] != other:
                self._other = other, other.build()
            objective = self._other[1]
        if rollout_id != self._rollout_id:
            self._backend.begin_rollout(rollout_id)
            self._rollout_id = rollout_id
        recorded = RecordedObjective(objective)
        call, pack = partial(recorded.around, self._backend.forward_backward), partial(self._packed, shard, columns)
        repeat = not self._has_gradients
        self._has_gradients = False
        _, micros = self._memory.fit(call, pack, micros, shard.total_length, TRAINING, may_repeat=repeat)
        self._has_gradients = True
        loss, scored = recorded.results()
        return loss, columns_of(shard, micros, scored)

    def optim_step(self, settings: StepSettings = StepSettings()) -> StepReport:
        self._has_gradients = False
        return replace(self._backend.optim_step(settings), split_micro_batches=self._memory.take_splits())

    def _packed(self, shard: Batch, columns: TokenColumns | None, micros: Sequence[Int64]) -> list[MicroBatch]:
        pack = partial(pack_micro_batch, columns=columns, temperature=self._spec.temperature, pixels=self._pixels)
        return [pack(shard, samples) for samples in micros]

    def export_weights(self, version: int, bucket_bytes: int) -> Iterator[Bucket | None]:
        """Every rank must exhaust it: rank 0 gives the buckets, the others None."""
        return buckets_of(self._export(), version=version, bucket_bytes=bucket_bytes)

    def send_weights(self, version: int, engines: Sequence[EngineEndpoint]) -> SentReport:
        """Sends the weights to the engines through the transport's sender."""
        if self._sender is None:
            raise EngineError("the weight transport of this run has no sender on the trainer's ranks.")
        export = self._backend.export_adapter if self._sends_adapter else self._export
        return self._sender.send(export, version, engines)

    def _export(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        """Layers in the engines' format. Not a generator, which ends at an error: the other layers must still be gathered."""
        layers = self._backend.export_weights(all_ranks=all_ranks)
        if self._format is None:
            return layers
        return map(partial(converted, self._format), layers)

    def save(self, folder: Path) -> None:
        self._backend.save(folder)

    def stage(self, folder: Path) -> None:
        """Copies what `save` would write, and writes it beside the next calls; `written` waits for the end."""
        if self._writing is not None:
            # Cancelled by the driver, because of another rank.
            wait([self._writing])
        self._writing = self._writer.submit(self._backend.stage(folder))

    def written(self) -> bool:
        """True if the data that was staged last is written; raises the error of the writer."""
        if self._writing is None or not self._writing.done():
            return False
        self._writing.result()
        return True

    def load(self, folder: Path) -> None:
        self._backend.load(folder)

    def save_hf(self, folder: Path) -> None:
        self._backend.save_hf(folder)

    def update_frozen_model(self, name: str) -> None:
        self._backend.update_frozen_model(name)

    def of_backend(self, method: str, *args: Any) -> Any:
        """Calls a method that this backend has beside those of its contract."""
        return getattr(self._backend, method)(*args)

    def sleep(self, keep_weights: bool = False) -> None:
        self._backend.sleep(keep_weights)

    def wake_up(self, weights_only: bool = False) -> None:
        self._backend.wake_up(weights_only)

    def free_cache(self) -> None:
        self._backend.free_cache()

    def close(self) -> None:
        """Closes everything, also if one part fails; raises the error of that part."""
        with ExitStack() as stack:
            stack.callback(self._backend.close)
            stack.callback(self._writer.shutdown)
            if self._sender is not None:
                stack.callback(self._sender.close)


def columns_of(shard: Batch, micros: Sequence[Int64], scored: Sequence[Scores]) -> Mapping[str, Float32]:
    """Over the shard's response tokens, NaN where no micro-batch has the token or another rank holds it. `scored`: of each
    micro-batch, or empty."""
    columns: dict[str, Float32] = {}
    for samples, scores in zip(micros, scored, strict=bool(scored)):
        rows = shard.response_rows(samples)
        held = rows if scores.rows is None else rows[scores.rows]
        for name, values in scores.present().items():
            column = columns.setdefault(name, np.full(len(shard.mask), np.nan, np.float32))
            column[held] = values
    return columns


def use_device(setup: TrainerSetup) -> None:
    """Sets the device of this thread: a new thread uses GPU 0, and torch's writers would allocate memory there."""
    if setup.device == "cuda":
        torch.cuda.set_device(setup.local_rank)
