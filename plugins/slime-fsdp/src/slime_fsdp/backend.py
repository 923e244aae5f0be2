"""FsdpBackend: one rank's view of a model sharded with torch FSDP2.

Legend: T response tokens of a micro-batch that this rank holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_core.atomic_io.storage import storage_error
from slime_core.contracts.backend import ACTOR, Objective, ObjectiveOutput, OutOfDeviceMemory, Scores
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import ConfigError, ModelError, TrainingError
from slime_core.types.microbatch import MicroBatch
from slime_core.types.report import StepReport
from slime_core.types.weights import Bucket
from slime_core.workers.buckets import make_bucket
from slime_fsdp import checkpoint
from slime_fsdp.adapters import base_name, config_file_of, copy_trained, is_adapter, replaced, trained_parameters
from slime_fsdp.architecture import differences
from slime_fsdp.config import FsdpConfig
from slime_fsdp.export import adapter_tensors, base_shapes, copy_weights, frozen_names, whole_tensors, write_folder
from slime_fsdp.held_adapters import Accumulated, HeldAdapter, HeldAdapters, sum_gradients
from slime_fsdp.optimizer import (
    gradient_norm,
    learning_rate,
    make_optimizer,
    make_state,
    optimizer_tensors,
    scale_gradients,
    set_step,
    state_sizes,
)
from slime_fsdp.optimizer_step import OptimizerStep
from slime_fsdp.packed_model import Outputs, PackedModel, forget_iteration, reload
from slime_fsdp.preparation import prepare
from slime_fsdp.staging import Staging
from slime_fsdp.trainer import Trainer, make_trainer
from slime_training.adapters.backend import AdapterBackend
from slime_training.adapters.folder import AdapterCopy
from slime_training.adapters.shape import AdapterShape
from slime_training.chosen_optimizer import chosen_optimizer
from slime_training.collective_errors import raise_on_all_ranks
from slime_training.context_parallel import segments_of
from slime_training.device_memory import reports_out_of_memory
from slime_training.finite_state import StateTensor
from slime_training.frozen_copies import require_copy
from slime_training.head import EntropyMode, requested_entropy
from slime_training.prompt_stream import prompt_stream
from slime_training.prompt_targets import PromptTargetsBackend
from slime_training.random_state import random_state
from slime_training.restartable import RestartableBackend
from slime_training.rounded_adamw import local
from slime_training.scores import scores_of
from slime_training.trainer_backend import TrainerBackend


class FsdpBackend(TrainerBackend[Trainer], AdapterBackend, PromptTargetsBackend, RestartableBackend):
    def __init__(self, config: FsdpConfig) -> None:
        super().__init__(partial(make_trainer, config))
        self._config = config
        self._predicts_prompts = False
        self._expects = False
        """Host memory for the moments is allocated, or being allocated."""

    def forward_only(
        self, micros: Sequence[MicroBatch], *, weights: str = ACTOR, entropy: bool = False
    ) -> list[Scores]:
        trainer = self._ready
        if weights == ACTOR:
            with self._adapted():
                return self._score(trainer.model, micros, entropy)
        self._check_copy(weights)
        if weights in trainer.base_copies:
            with self._adapted(base=True):
                return self._score(trainer.model, micros, entropy)
        if weights in trainer.frozen_models:
            return self._score(trainer.frozen_models[weights], micros, entropy)
        with replaced(trainer.model.model, trainer.adapter_copies[weights]):
            return self._score(trainer.model, micros, entropy)

    def _score(self, model: PackedModel, micros: Sequence[MicroBatch], entropy: bool) -> list[Scores]:
        mode: EntropyMode = "metric" if entropy else "none"
        parts: list[tuple[MicroBatch, Outputs]] = []
        with torch.no_grad():
            for number, whole in enumerate(micros):
                with reports_out_of_memory(number, partial(forget_iteration, model)):
                    parts.append(self._outputs(model, whole, mode))
        for shard in model.shards():
            # A forward without a backward leaves the root's weights gathered; they would be stale at the next step.
            shard.reshard()
        return [scores_of(micro, columns_of(outputs)) for micro, outputs in parts]

    def _outputs(self, model: PackedModel, whole: MicroBatch, entropy: EntropyMode) -> tuple[MicroBatch, Outputs]:
        """With the part of `whole` that this rank holds under context parallelism."""
        several = self._predicts_prompts
        micro, plan = prepare(self._ready, self._config, prompt_stream(whole) if several else whole, share=not several)
        adapters = self._ready.adapters
        adapter = None if adapters is None else adapters.layers.used
        return micro, model(micro, plan, entropy, adapter, several)

    def _adapted(self, *, base: bool = False) -> AbstractContextManager[None]:
        """Within, forwards are those of the adapter in use; `base`: of the base."""
        adapters = self._ready.adapters
        if adapters is None:
            return nullcontext()
        return adapters.using(None if base else adapters.used)

    @property
    def _trained(self) -> Trainer | HeldAdapter:
        """Whose gradients and steps the next calls are. TrainingError for a base without an adapter in use."""
        trainer = self._ready
        if trainer.adapters is None:
            return trainer
        if trainer.adapters.used is None:
            raise TrainingError(
                "the base of adapters is frozen (backend.max_adapters), so it has no gradients: train an adapter "
                "(session.add_adapter), or leave backend.max_adapters out."
            )
        return trainer.adapters.used

    def forward_backward(self, micros: Sequence[MicroBatch], objective: Objective) -> None:
        trained = self._trained
        if not isinstance(trained, HeldAdapter):
            self._accumulate(trained, micros, objective)
            return
        # Each call alone, so that what earlier ones have added up is there after an error.
        earlier = Accumulated.taken(trained)
        try:
            with self._adapted():
                self._accumulate(trained, micros, objective)
        except OutOfDeviceMemory:
            if earlier is not None:
                earlier.put_back(trained)
            raise
        if earlier is not None:
            earlier.add(trained)

    def _accumulate(self, trained: Trainer | HeldAdapter, micros: Sequence[MicroBatch], objective: Objective) -> None:
        trainer = self._ready
        entropy = requested_entropy(objective)
        if trained.step is None:
            trained.step = OptimizerStep.begun(trained.trained(), trainer.placement.device)
        else:
            trained.step.gradients.take()
        step = trained.step
        for number, whole in enumerate(micros, start=1):
            self._sync_gradients(number == len(micros))
            with reports_out_of_memory(number - 1, self._drop_gradients):
                result = self._backward(whole, objective, entropy)
            if number < len(micros):
                step.gradients.take()
            step.add(result)

    def optim_step(self, settings: StepSettings = StepSettings()) -> StepReport:
        trainer, trained = self._ready, self._trained
        step, trained.step = trained.step, None
        if step is None:
            raise TrainingError("optim_step without gradients: call forward_backward first.")
        step.gradients.give()
        if isinstance(trained, HeldAdapter):
            sum_gradients(step.parameters, trainer.ranks.group)
        norm = gradient_norm(step.parameters).to(step.loss.device)
        finite = trainer.ranks.all_agree(step.loss.isfinite() & norm.isfinite())
        # One transfer to the host for all metrics of the step.
        grad_norm, is_finite, *totals = torch.stack(
            [norm.double(), finite.double(), *(value.double() for value in step.sums.values())]
        ).tolist()
        lr = settings.lr
        if lr is None:
            lr = learning_rate(trainer.setup.optimizer, trained.steps_done, trainer.setup.total_steps)
        if is_finite:
            self._step(trained, step.parameters, grad_norm, settings, lr)
        trained.optimizer.zero_grad(set_to_none=True)
        return StepReport(
            sums=dict(zip(step.sums, totals, strict=True)),
            grad_norm=grad_norm,
            lr=lr,
            skipped=not is_finite,
            nonfinite=self._nonfinite() if is_finite else None,
            seconds=time.perf_counter() - step.began,
        )

    def _backward(self, whole: MicroBatch, objective: Objective, entropy: EntropyMode) -> ObjectiveOutput:
        """Adds the gradients of a micro-batch. The result has no graph."""
        trainer = self._ready
        micro, outputs = self._outputs(trainer.model, whole, entropy)
        result = objective(
            micro,
            segments=segments_of(micro, trainer.ranks.cp_group),
            log_probs=outputs.log_probs,
            entropy=outputs.entropy,
            values=outputs.values,
        )
        result.loss.backward()
        return replace(result, loss=result.loss.detach())

    def _drop_gradients(self) -> None:
        trained = self._trained
        trained.step = None
        forget_iteration(self._ready.model)
        trained.optimizer.zero_grad(set_to_none=True)

    def _step(
        self,
        trained: Trainer | HeldAdapter,
        parameters: Sequence[torch.nn.Parameter],
        grad_norm: float,
        settings: StepSettings,
        lr: float,
    ) -> None:
        keys = self._ready.setup.optimizer
        limit = keys.clip_grad if settings.clip_grad is None else settings.clip_grad
        if 0 < limit < grad_norm:
            scale_gradients(parameters, limit / grad_norm)
        set_step(trained.optimizer, keys, settings, lr)
        trained.optimizer.step()
        trained.steps_done += 1

    def _sync_gradients(self, last: bool) -> None:
        trainer = self._ready
        each = self._config.sync_each_micro_batch
        if each is None:
            each = trainer.placement.device.type == "cuda"
        for shard in trainer.model.shards():
            shard.set_requires_gradient_sync(each or last, recurse=False)

    def _check_copy(self, name: str) -> None:
        trainer = self._ready
        require_copy(name, [*trainer.frozen_models, *trainer.adapter_copies, *trainer.base_copies])

    def export_weights(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        trainer = self._ready
        keep = all_ranks or trainer.ranks.is_first
        return whole_tensors(trainer.model, trainer.placement.compute_dtype, keep=keep)

    def frozen_tensors(self) -> frozenset[str]:
        return frozen_names(self._ready.model)

    def export_adapter(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        trainer = self._ready
        keep = all_ranks or trainer.ranks.is_first
        return adapter_tensors(trainer.model, keep=keep, dtype=trainer.placement.compute_dtype)

    def adapter_config(self) -> Mapping[str, Any]:
        return config_file_of(self._ready.model.adapters)

    def new_optimizer(self) -> None:
        trainer = self._of_all_weights
        if trainer.step is not None:
            self._drop_gradients()
        trainer.optimizer = make_optimizer(
            trainer.model, chosen_optimizer(trainer.setup), trainer.setup.optimizer, self._config
        )
        trainer.steps_done = 0

    def restart(self) -> None:
        trainer = self._of_all_weights
        reload(trainer.model, trainer.folder, self._config, trainer.placement, seed=trainer.setup.seed)
        self.new_optimizer()

    @property
    def _of_all_weights(self) -> Trainer:
        if self._config.freezes_base:
            raise ConfigError("backend fsdp trains adapters here: leave lora_rank and max_adapters out.")
        return self._ready

    def predict_prompts(self, on: bool) -> None:
        self._predicts_prompts = on

    def use_adapter(self, name: str | None) -> None:
        self._adapters.use(name)

    def add_adapter(self, name: str, shape: AdapterShape, seed: int) -> None:
        self._adapters.add(name, shape, seed)

    def load_adapter(self, name: str, folder: Path, optimizer: bool) -> int:
        return self._adapters.load(name, folder, optimizer)

    def remove_adapter(self, name: str) -> None:
        self._adapters.remove(name)

    def save_adapter(self, name: str, folder: Path, optimizer: bool) -> None:
        adapters, ranks = self._adapters, self._ready.ranks
        write = partial(adapters.save, name, folder, optimizer) if ranks.is_first else lambda: None
        try:
            raise_on_all_ranks(write, ranks.group, self._ready.setup.world_size)
        except OSError as error:
            raise storage_error(folder, error) from error

    def copy_adapter(self, name: str, optimizer: bool) -> AdapterCopy | None:
        return self._adapters.copy(name, optimizer) if self._ready.ranks.is_first else None

    def export_adapter_of(self, name: str) -> Bucket | None:
        trainer = self._ready
        if not trainer.ranks.is_first:
            return None
        tensors = self._adapters.named(name).low_rank.tensors()
        stored = [(name, tensor.detach().to(trainer.placement.compute_dtype)) for name, tensor in tensors.items()]
        return make_bucket(stored, version=0, index=0, last=True)

    @property
    def _adapters(self) -> HeldAdapters:
        if (adapters := self._ready.adapters) is None:
            raise ConfigError("backend fsdp trains the weights themselves here. Set backend.max_adapters.")
        return adapters

    def save_hf(self, folder: Path) -> None:
        trainer = self._ready
        write_folder(trainer.model, trainer.folder, folder, group=trainer.ranks.group)

    def save(self, folder: Path) -> None:
        trainer = self._ready
        checkpoint.write(folder, self._snapshot(), trainer.ranks, trainer.checkpoint_groups.saving)

    def stage(self, folder: Path) -> Callable[[], None]:
        trainer = self._ready
        if trainer.staging is None:
            trainer.staging = Staging(trainer.placement.device)
        snapshot = self._snapshot()
        snapshot = replace(snapshot, tensors=trainer.staging.copied(snapshot.tensors))
        return partial(checkpoint.write, folder, snapshot, trainer.ranks, trainer.checkpoint_groups.staging)

    def _snapshot(self) -> checkpoint.Snapshot:
        trainer = self._ready
        frozen_models = sorted(trainer.refreshed)
        return checkpoint.Snapshot(
            tensors=self._tensors(frozen_models),
            random=random_state(),
            steps_done=trainer.steps_done,
            frozen_models=frozen_models,
        )

    def _load(self, folder: Path) -> None:
        trainer = self._ready
        manifest = checkpoint.read_manifest(folder)
        for name in manifest.copies:
            self._check_copy(name)
            if name in trainer.frozen_models:
                self._require_architecture(name)
        if not trainer.optimizer_driver.state_before_steps:
            make_state(trainer.optimizer, self._parameter_names(), checkpoint.shapes_and_dtypes(folder))
        checkpoint.read(folder, manifest, self._tensors(manifest.copies), trainer.ranks)
        trainer.steps_done = manifest.steps_done
        trainer.refreshed = set(manifest.copies)

    def _tensors(self, frozen_models: Sequence[str]) -> dict[str, Tensor]:
        """All tensors of a checkpoint except random state; loading writes into the same tensors. The base of adapters is in its
        own folder."""
        trainer = self._ready
        names = self._parameter_names()
        state = trainer.model.model.state_dict()
        kept = trainer.model.weight_names
        if trainer.model.adapters is not None:
            frozen = {name for name, parameter in trainer.model.model.named_parameters() if not parameter.requires_grad}
            kept = [name for name in kept if name not in frozen]
        tensors = {f"model.{name}": state[name] for name in kept}
        tensors |= optimizer_tensors(trainer.optimizer, trainer.optimizer_driver, names)
        for copy in frozen_models:
            if copy in trainer.adapter_copies:
                tensors |= {f"copy.{copy}.{name}": value for name, value in trainer.adapter_copies[copy].items()}
                continue
            state = trainer.frozen_models[copy].model.state_dict()
            tensors |= {f"copy.{copy}.{name}": state[name] for name in trainer.frozen_models[copy].weight_names}
        return tensors

    def _state(self) -> Iterator[StateTensor]:
        adapters = self._ready.adapters
        return super()._state() if adapters is None or adapters.used is None else adapters.used.state()

    @torch.no_grad()
    def _weights(self) -> Iterator[StateTensor]:
        trainer = self._ready
        packed = trainer.model
        dtypes = tuple(dict.fromkeys((trainer.placement.compute_dtype, trainer.folder.dtype)))
        for name, parameter in trained_parameters(packed.model).items():
            yield StateTensor(
                name=f"weight {base_name(name)}",
                tensor=local(parameter),
                dtypes=() if base_name(name) in packed.wide else dtypes,
                merged=is_adapter(name),
            )

    def _moments(self) -> Iterator[StateTensor]:
        trainer = self._ready
        names = self._parameter_names()
        for parameter in trainer.optimizer.state:
            for key, value in trainer.optimizer_driver.state_of(trainer.optimizer, parameter).items():
                yield StateTensor(name=f"{key} of {base_name(names[id(parameter)])}", tensor=local(value))

    def _parameter_names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._ready.model.model.named_parameters()}

    def update_frozen_model(self, name: str) -> None:
        trainer = self._ready
        self._check_copy(name)
        if name in trainer.base_copies:
            return
        if name in trainer.adapter_copies:
            copy_trained(trainer.model.model, trainer.adapter_copies[name])
        else:
            self._require_architecture(name)
            copy_weights(trainer.model, trainer.frozen_models[name])
        trainer.refreshed.add(name)

    def _require_architecture(self, name: str) -> None:
        """Raises an error if a frozen copy has another architecture: its positions and norms come from its own folder, so the
        trained weights would compute other log-probs in it."""
        trainer = self._ready
        copy = trainer.frozen_models[name]
        found = differences(trainer.model.model.config, copy.model.config)
        if base_shapes(copy) != base_shapes(trainer.model):
            found.append("shapes of weights")
        if found:
            raise ModelError(
                f'weights "{name}": {trainer.setup.frozen_models[name]} has another architecture than the trained model '
                f"{trainer.folder.path} ({', '.join(found)}), so it cannot be refreshed from it. Leave "
                "train.ref_update_interval out, or set a copy with the same values in its config.json."
            )

    def sleep(self, keep_weights: bool = False) -> None:
        trainer = self._ready
        trainer.step = None
        trainer.optimizer.zero_grad(set_to_none=True)
        for held in self._held:
            held.step = None
            held.optimizer.zero_grad(set_to_none=True)
        if not self._expects:
            self._expects = True
            device = trainer.placement.device.type
            trainer.offloader.expect(state_sizes(trainer.optimizer, trainer.optimizer_driver, self._config, device))
        state = trainer.optimizer.state.values()
        moments = (local(value) for of_one in state for value in of_one.values() if isinstance(value, Tensor))
        trainer.offloader.sleep(
            tensors_of(trainer.model), list(self._other_tensors()), moments, keep_weights=keep_weights
        )
        self.free_cache()

    def wake_up(self, weights_only: bool = False) -> None:
        self._ready.offloader.wake_up(weights_only=weights_only)

    def _other_tensors(self) -> Iterator[Tensor]:
        """Tensors that `export_weights` does not read, besides the optimizer's state."""
        trainer = self._ready
        for copy in trainer.frozen_models.values():
            yield from tensors_of(copy)
        for values in trainer.adapter_copies.values():
            yield from map(local, values.values())
        for held in self._held:
            yield from held.tensors()

    @property
    def _held(self) -> Iterable[HeldAdapter]:
        adapters = self._ready.adapters
        return () if adapters is None else adapters.held.values()


def tensors_of(model: torch.nn.Module) -> list[Tensor]:
    return [local(tensor) for tensor in chain(model.parameters(), model.buffers())]


def columns_of(outputs: Outputs) -> dict[str, Tensor]:
    return {name: value for name, value in outputs._asdict().items() if value is not None}
