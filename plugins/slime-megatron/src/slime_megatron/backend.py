"""MegatronBackend: one rank's view of a model that Megatron-core shards over ranks.

Legend: T response tokens of a micro-batch that this rank holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Before any import of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core.pipeline_parallel import get_forward_backward_func

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_core.contracts.backend import ACTOR, Objective, Scores
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import TrainingError
from slime_core.types.microbatch import MicroBatch
from slime_core.types.report import StepReport
from slime_megatron import checkpoint
from slime_megatron.clipping import clip, is_finite_step
from slime_megatron.config import MegatronOptions
from slime_megatron.expert_counts import biases_of, forget_counts
from slime_megatron.frozen_models import put
from slime_megatron.gradients import add_gradients, copied_gradients
from slime_megatron.hooks import before_log_probs, before_train_step
from slime_megatron.micro_batch_inputs import MicroBatchInputs
from slime_megatron.mtp import drop_embedding, fetch_embedding
from slime_megatron.optimizer import optimizer_state, set_step
from slime_megatron.optimizer_step import OptimizerStep
from slime_megatron.preparation import prepare
from slime_megatron.process import Ranks
from slime_megatron.scaling import scale_losses
from slime_megatron.sequence_balance import balances_sequences
from slime_megatron.trainer import Trainer, make_trainer
from slime_megatron.weights import write_folder
from slime_training.context_parallel import segments_of
from slime_training.device_memory import reports_out_of_memory
from slime_training.finite_state import StateTensor
from slime_training.frozen_copies import require_copy
from slime_training.head import EntropyMode, requested_entropy
from slime_training.scores import scores_of
from slime_training.trainer_backend import TrainerBackend

LossFn = Callable[[MicroBatchInputs, Any], tuple[Tensor, Tensor, tuple[Tensor, Mapping[str, Tensor]]]]
"""(micro-batch, output of the last stage) to (loss times the step's tokens, number of tokens of the micro-batch, metrics to
report)."""


class MegatronBackend(TrainerBackend[Trainer]):
    def __init__(self, config: MegatronOptions) -> None:
        super().__init__(partial(make_trainer, config))
        self._config = config
        self._rollout_id = self._step_id = 0
        """Of the next optimizer step."""

    def forward_only(
        self, micros: Sequence[MicroBatch], *, weights: str = ACTOR, entropy: bool = False
    ) -> list[Scores]:
        trainer = self._ready
        if weights != ACTOR:
            self._check_copy(weights)
        with nullcontext() if weights == ACTOR else trainer.frozen_models.swapped_in(weights):
            before_log_probs(trainer, weights)
            return self._score(micros, "metric" if entropy else "none", trained=weights == ACTOR)

    def _score(self, micros: Sequence[MicroBatch], entropy: EntropyMode, *, trained: bool) -> list[Scores]:
        """`trained`: the weights in the model are the trained ones, whose choice of experts may be replayed."""
        trainer = self._ready
        routing = trainer.routing if trained else None
        if routing is not None:
            routing.begin_scores()
        works = [
            prepare(trainer, micro, entropy, None if routing is None or routing.records else routing)
            for micro in micros
        ]

        def keep(work: MicroBatchInputs, output: Tensor, non_loss_data: bool = True) -> tuple[MicroBatchInputs, Tensor]:
            return work, output.cpu()

        # Megatron requires equally many calls of every virtual stage, in multiples of the number of stages.
        found = self._run(works, keep, forward_only=True, records=trained)
        if not found:
            return [no_scores(trainer.setup.head, entropy) for _ in works]
        return [scores_of(work.micro, columns_of(trainer.setup.head, output)) for work, output in found]

    def _run(
        self, works: Sequence[MicroBatchInputs], finish: Any, *, forward_only: bool, records: bool = False
    ) -> list[Any]:
        """Runs all micro-batches through Megatron's schedule. Returns the results of `finish`, on the last stage. `records`:
        the choices of routers may be replayed later."""
        trainer = self._ready
        routing, device = trainer.routing, trainer.placement.device
        for chunk in trainer.chunks:
            chunk.train(not forward_only)
        begun: list[MicroBatchInputs] = []

        def forward_step(source: Iterator[MicroBatchInputs], chunk: nn.Module) -> tuple[Tensor, Any]:
            work = next(source)
            begun.append(work)
            if routing is None:
                return chunk(work=work), lambda output, **kwargs: finish(work, output, **kwargs)
            number = next(number for number, known in enumerate(trainer.chunks) if known is chunk)
            routing.before(number, work.experts, training=not forward_only, device=device)
            output = chunk(work=work)
            if records and routing.records:
                routing.keep(number, work.micro, trainer.layout.cp_size)
            return output, lambda output, **kwargs: finish(work, output, **kwargs)

        sources = [iter(works) for _ in trainer.chunks]
        with (
            reports_out_of_memory(lambda: (len(begun) - 1) // len(sources), partial(self._drop_step, forward_only)),
            torch.no_grad() if forward_only else nullcontext(),
        ):
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=sources if len(sources) > 1 else sources[0],
                model=trainer.chunks if len(trainer.chunks) > 1 else trainer.chunks[0],
                num_microbatches=len(works),
                seq_length=max(work.tokens.shape[1] for work in works),
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        if routing is not None:
            frozen = self._config.freeze_params_name_list or self._config.only_train_params_name_list
            routing.end(all_trained=not frozen)
        return found

    def begin_rollout(self, rollout_id: int) -> None:
        self._rollout_id, self._step_id = rollout_id, 0

    def forward_backward(self, micros: Sequence[MicroBatch], objective: Objective) -> None:
        trainer = self._ready
        began = time.perf_counter()
        entropy = requested_entropy(objective)
        works = [prepare(trainer, micro, entropy, trainer.routing, ahead=True) for micro in micros]
        # Losses are divided by the call's tokens, so that Megatron's auxiliary losses become means over them: the objective,
        # which already is a sum over its own denominator, is multiplied by them.
        tokens = over_ranks(trainer.ranks, [work.num_tokens for work in works])
        scale_losses(trainer.config, trainer.optimizer, tokens)
        weigh_sequences(trainer, works, tokens)
        loss_fn = self._loss_fn(objective, tokens, targets_ahead(trainer, works))
        earlier = [] if trainer.step is None else copied_gradients(trainer.chunks)
        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        if trainer.step is None:
            trainer.optimizer.zero_grad()
            set_step(trainer.schedule, trainer.steps_done)
            before_train_step(trainer, self._rollout_id, self._step_id)
            trainer.step = OptimizerStep(biases=biases_of(trainer.tensors), began=began)
        if trainer.num_ahead:
            fetch_embedding(trainer.bare)
        trainer.step.found += self._run(works, loss_fn, forward_only=False)
        add_gradients(trainer.chunks, earlier)
        for chunk in trainer.bare:
            chunk.sequence_balance.forget()
        if trainer.num_ahead:
            drop_embedding(trainer.bare)

    def optim_step(self, settings: StepSettings = StepSettings()) -> StepReport:
        trainer = self._ready
        step, trainer.step = trainer.step, None
        if step is None:
            raise TrainingError("optim_step without gradients: call forward_backward first.")
        loss, sums = reduce_metrics(step.found, trainer.placement.device)
        if settings.lr is not None:
            # The next step sets them to the schedule's.
            for group in trainer.optimizer.param_groups:
                group["lr"] = settings.lr
        lr = float(trainer.optimizer.param_groups[0]["lr"])
        grad_norm, finite = is_finite_step(trainer.optimizer, loss, trainer.ranks)
        nonfinite = None
        if finite:
            clip(trainer.optimizer, grad_norm)
            trainer.optimizer.step_with_ready_grads()
            trainer.steps_done += 1
            nonfinite = self._nonfinite()
        else:
            put(step.biases, trainer.tensors)
        trainer.optimizer.zero_grad()
        self._step_id += 1
        return StepReport(
            sums={name: float(value) for name, value in sums.items()} if trainer.layout.reports else {},
            grad_norm=grad_norm,
            lr=lr,
            skipped=not finite,
            nonfinite=nonfinite,
            seconds=time.perf_counter() - step.began,
        )

    def _drop_step(self, forward_only: bool) -> None:
        """After a micro-batch that did not fit into memory. The next step zeroes the gradients."""
        trainer = self._ready
        if not forward_only:
            trainer.step = None
        for chunk in trainer.bare:
            forget_counts(chunk)
            chunk.sequence_balance.forget()
        if trainer.num_ahead:
            drop_embedding(trainer.bare)
        if trainer.routing is not None:
            trainer.routing.end(all_trained=False)

    def _loss_fn(self, objective: Objective, tokens: float, targets: Tensor) -> LossFn:
        """`tokens`: of the step on all ranks. `targets` (K,): of each layer of multi-token prediction."""
        head, factor = self._ready.setup.head, self._config.mtp_loss_scaling_factor
        group = self._ready.ranks.cp_group

        def loss_fn(
            work: MicroBatchInputs, output: Tensor | tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, tuple[Tensor, Mapping[str, Tensor]]]:
            scored, ahead = output if isinstance(output, tuple) else (output, None)
            result = objective(work.micro, segments=segments_of(work.micro, group), **columns_of(head, scored))
            count = work.num_tokens.to(torch.int)
            loss, sums = result.loss, result.sums
            if ahead is not None:
                means = ahead / targets
                loss = loss + factor * means.mean()
                sums = {**sums, **metrics_ahead(means.detach())}
            return loss * tokens, count, (loss.detach(), sums)

        return loss_fn

    def _check_copy(self, name: str) -> None:
        require_copy(name, self._ready.frozen_models.names)

    def export_weights(self, *, all_ranks: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        trainer = self._ready
        return trainer.table.export(trainer.placement.dtype, keep=all_ranks or trainer.ranks.is_first)

    def save_hf(self, folder: Path) -> None:
        trainer = self._ready
        write_folder(trainer.table, trainer.folder, folder, head=trainer.setup.head)

    def save(self, folder: Path) -> None:
        trainer = self._ready
        group = trainer.checkpoint_groups.saving
        self._write(folder, checkpoint.PlainSave(group))(group)

    def stage(self, folder: Path) -> Callable[[], None]:
        trainer = self._ready
        group = trainer.checkpoint_groups.staging
        on_host = trainer.placement.device.type == "cpu" or bool(getattr(self._config, "optimizer_cpu_offload", False))
        strategy = checkpoint.StagedSave(trainer.staging, trainer.placement.device, trains_on_host=on_host)
        return partial(self._write(folder, strategy), group)

    def _write(self, folder: Path, strategy: checkpoint.PlainSave) -> checkpoint.Write:
        trainer = self._ready
        return checkpoint.write(
            folder,
            trainer.bare,
            trainer.optimizer,
            trainer.frozen_models,
            refreshed=sorted(trainer.refreshed),
            steps_done=trainer.steps_done,
            shapes=self._shapes(),
            strategy=strategy,
        )

    def _load(self, folder: Path) -> None:
        trainer = self._ready
        role = trainer.setup.role
        table = "backend" if role == ACTOR else f"roles.{role}.backend"
        manifest = checkpoint.read_manifest(folder, self._shapes(), table)
        for name in manifest.copies:
            self._check_copy(name)
        checkpoint.read(folder, manifest, trainer.bare, trainer.optimizer, trainer.frozen_models)
        trainer.steps_done = manifest.steps_done
        trainer.refreshed = set(manifest.copies)

    def _weights(self) -> Iterator[StateTensor]:
        trainer = self._ready
        for name, tensor in trainer.tensors.items():
            if tensor.requires_grad:
                yield StateTensor(name=f"weight {name}", tensor=tensor.detach(), dtypes=(trainer.folder.dtype,))

    def _moments(self) -> Iterator[StateTensor]:
        trainer = self._ready
        return optimizer_state(trainer.optimizer, trainer.tensors)

    def _shapes(self) -> dict[str, Any]:
        """Shapes of the whole model, independent of the layout."""
        trainer = self._ready
        plain = {name: value for name, value in trainer.architecture.options.items() if not callable(value)}
        rounded = self._config.main_params_dtype == "bf16"
        return {
            **plain,
            # Only if it is bf16: checkpoints with float32 weights do not have the key.
            **({"main_params_dtype": "bf16"} if rounded else {}),
            "vocab_size": trainer.architecture.vocab_size,
            "head": trainer.setup.head,
            "optimizer": trainer.setup.optimizer.optimizer,
            "dtype": str(trainer.placement.dtype),
        }

    def update_frozen_model(self, name: str) -> None:
        trainer = self._ready
        self._check_copy(name)
        trainer.frozen_models.take(name)
        trainer.refreshed.add(name)

    def sleep(self, keep_weights: bool = False) -> None:
        self._ready.step = None
        self._ready.residency.sleep(keep_weights=keep_weights)
        self.free_cache()

    def wake_up(self, weights_only: bool = False) -> None:
        self._ready.residency.wake_up(weights_only=weights_only)


def over_ranks(ranks: Ranks, counts: Sequence[Tensor]) -> float:
    """The sum of `counts` over all micro-batches of all ranks."""
    count = torch.stack(list(counts)).sum().to(torch.float64)
    dist.all_reduce(count)
    # Every tensor-parallel and pipeline rank has counted the same tokens.
    return float(count) / (ranks.shape.tp * ranks.shape.pp)


def targets_ahead(trainer: Trainer, works: Sequence[MicroBatchInputs]) -> Tensor:
    """(K,) float32: number of targets of each layer of multi-token prediction in this step, at least 1."""
    device = trainer.placement.device
    counts = [
        over_ranks(trainer.ranks, [torch.tensor(len(work.ahead[depth].targets), device=device) for work in works])
        for depth in range(len(works[0].ahead))
    ]
    return torch.tensor(counts, device=device).clamp(min=1.0)


def weigh_sequences(trainer: Trainer, works: Sequence[MicroBatchInputs], tokens: float) -> None:
    """Makes the balance loss of each sequence its share of a mean over the step's sequences. `tokens`: of the step."""
    if not balances_sequences(trainer.config):
        return
    counts = [torch.tensor(work.micro.num_samples, device=work.tokens.device) for work in works]
    # Context-parallel ranks have parts of the same sequences.
    sequences = over_ranks(trainer.ranks, counts) / trainer.ranks.shape.cp
    for chunk in trainer.bare:
        chunk.sequence_balance.begin_step(tokens / max(sequences, 1.0))


def reduce_metrics(
    found: Sequence[tuple[Tensor, Mapping[str, Tensor]]], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums over micro-batches: the loss, and each metric by its name."""
    loss = torch.zeros((), device=device)
    sums: dict[str, Tensor] = {}
    for part, of_micro in found:
        loss = loss + part
        for name, value in of_micro.items():
            sums[name] = sums[name] + value if name in sums else value
    return loss, sums


def columns_of(head: str, output: Tensor) -> dict[str, Tensor]:
    """Names the rows of (K, T), the output of the model's last stage."""
    names = ["values"] if head == "value" else ["log_probs", "entropy"][: len(output)]
    return dict(zip(names, output.unbind(0), strict=True))


def metrics_ahead(means: Tensor) -> dict[str, Tensor]:
    """Metrics from this micro-batch's share of each layer's mean cross-entropy."""
    return {f"mtp_{depth}_loss": mean for depth, mean in enumerate(means.unbind(), 1)} | {"mtp_loss": means.sum()}


def no_scores(head: str, entropy: EntropyMode) -> Scores:
    """Empty scores, for a stage that is not the last."""
    names = ["values"] if head == "value" else ["log_probs", *(["entropy"] if entropy != "none" else [])]
    return Scores(**{name: np.empty(0, np.float32) for name in names}, rows=np.empty(0, np.int64))
