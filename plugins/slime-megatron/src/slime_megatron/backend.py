"""MegatronBackend: one rank's view of a model that Megatron-core shares over ranks.

Legend: T response tokens of a micro-batch that this rank holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Before any of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime_core.batch.zigzag import ZigzagSegments, split_micro_batch
from slime_core.contracts.backend import ACTOR, Layout, Objective, Scores, TrainBackend, TrainerSetup
from slime_core.contracts.loss import Segments
from slime_core.errors import ConfigError, ModelError, unknown_name
from slime_core.objective.segments import LocalSegments
from slime_core.training.head import EntropyMode
from slime_core.types.microbatch import MicroBatch
from slime_core.types.report import StepReport
from slime_megatron import checkpoint
from slime_megatron.attention import padded_positions, plan_attention, whole_sequences, with_padding, zigzag_part
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.clipping import clip, is_finite_step
from slime_megatron.copies import Values, copied, replaced
from slime_megatron.cpu import use_cpu
from slime_megatron.delta_net import plan_delta
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.model import Placement, Work, build_chunks, check_copy_shapes, make_config, wrap
from slime_megatron.optimizer import make_optimizer, make_schedule, set_step
from slime_megatron.options import RECORDS, megatron_folder
from slime_megatron.plugin import Megatron, MegatronOptions, megatron_options
from slime_megatron.prediction import ahead_of, bring_embedding, drop_embedding
from slime_megatron.process import Ranks, join
from slime_megatron.refusals import told_by_megatron
from slime_megatron.routing import Routing
from slime_megatron.transformer_engine import mend_absence
from slime_megatron.weights import WeightTable, local_tensors, write_folder


@dataclass(kw_only=True)
class _Trainer:
    """What `setup` makes."""

    setup: TrainerSetup
    layout: Layout
    ranks: Ranks
    placement: Placement
    folder: ModelFolder
    architecture: Architecture
    config: TransformerConfig
    bare: list[Any]
    """The model's pieces without wrapping."""
    chunks: list[Any]
    table: WeightTable
    tensors: dict[str, Tensor]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    routing: Routing | None
    num_ahead: int
    """Layers of multi-token prediction."""
    copies: dict[str, Values] = field(default_factory=dict)
    refreshed: set[str] = field(default_factory=set)
    steps_done: int = 0
    saving_group: dist.ProcessGroup | None = None
    """Of the thread that writes what was staged."""


class MegatronBackend(TrainBackend):
    def __init__(self, config: MegatronOptions) -> None:
        self._config = config
        self._trainer: _Trainer | None = None

    @property
    def _ready(self) -> _Trainer:
        if self._trainer is None:
            raise RuntimeError("call setup first")
        return self._trainer

    def setup(self, setup: TrainerSetup) -> Layout:
        options, shape = self._config, self._config.shape
        # Every rank looks at the folders before any of them waits for another.
        folder = open_folder(setup.model_path, trust_remote_code=setup.trust_remote_code)
        architecture = folder.bridge.architecture()
        copies = {
            name: open_folder(path, trust_remote_code=setup.trust_remote_code) for name, path in setup.copies.items()
        }
        for name, copy in copies.items():
            if setup.head != "lm":
                raise ModelError(f'weights "{name}": a critic has no frozen copies.')
            check_copy_shapes(name, architecture, copy.bridge.architecture())
        placement = placement_of(options, setup)
        ranks = join(setup, shape)
        layout = Megatron.layout(options, setup.rank, setup.world_size)
        torch.manual_seed(setup.seed + layout.dp_rank)
        if setup.device == "cuda":
            model_parallel_cuda_manual_seed(setup.seed)
        distributed = options.use_distributed_optimizer
        if distributed is None:
            distributed = setup.device == "cuda" and setup.optimizer.optimizer == "adam"
        if distributed and setup.optimizer.optimizer != "adam":
            raise ConfigError("backend.use_distributed_optimizer = true: only for train.optimizer = adam.")
        given = {name: value for of in RECORDS for name, value in megatron_options(options, of).items()}
        refused = partial(told_by_megatron, given, megatron_folder())
        with refused():
            config = make_config(architecture, options, shape, placement)
            bare = build_chunks(config, architecture, options, shape, placement, head=setup.head)
        table = WeightTable(bare, folder.bridge, architecture.vocab_size)
        values: dict[str, Values] = {}
        for name, copy in copies.items():
            table.load(copy)
            values[name] = copied(local_tensors(bare))
        if setup.head == "value":
            fresh_value_head(bare[-1], setup.seed)
        table.load(folder, fresh=("score.weight", "score.bias") if setup.head == "value" else ())
        with refused():
            chunks = wrap(bare, config, options, placement, distributed_optimizer=distributed)
            optimizer = make_optimizer(chunks, setup.optimizer, options, placement, distributed=distributed)
        self._trainer = _Trainer(
            setup=setup,
            layout=layout,
            ranks=ranks,
            placement=placement,
            folder=folder,
            architecture=architecture,
            config=config,
            bare=bare,
            chunks=chunks,
            table=WeightTable(bare, folder.bridge, architecture.vocab_size),
            tensors=local_tensors(bare),
            optimizer=optimizer,
            schedule=make_schedule(optimizer, setup.optimizer, setup.total_steps),
            num_ahead=options.mtp_num_layers if setup.head == "lm" else 0,
            routing=None if setup.routing_replay is None else Routing(bare, config, setup.routing_replay),
            copies=values,
        )
        self._connect()
        return layout

    def _connect(self) -> None:
        """What Megatron's schedules call."""
        trainer = self._ready
        config = trainer.config
        config.finalize_model_grads_func = finalize_model_grads
        if trainer.placement.dtype == torch.float16:
            config.grad_scale_func = trainer.optimizer.scale_loss
        if trainer.chunks[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in trainer.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def score(self, micros: Sequence[MicroBatch], *, weights: str = ACTOR, entropy: bool = False) -> list[Scores]:
        trainer = self._ready
        if weights != ACTOR:
            self._check_copy(weights)
        with nullcontext() if weights == ACTOR else replaced(trainer.tensors, trainer.copies[weights]):
            return self._score(micros, "metric" if entropy else "none", trained=weights == ACTOR)

    def _score(self, micros: Sequence[MicroBatch], entropy: EntropyMode, *, trained: bool) -> list[Scores]:
        """`trained`: they are the trained weights, whose choice of experts may be replayed."""
        trainer = self._ready
        routing = trainer.routing if trained else None
        if routing is not None:
            routing.begin_scores()
        works = [
            self._prepare(micro, entropy, None if routing is None or routing.records else routing) for micro in micros
        ]

        def keep(work: Work, output: Tensor, non_loss_data: bool = True) -> tuple[Work, Tensor]:
            return work, output.cpu()

        # Megatron wants equally many calls of every virtual stage, in multiples of the stages.
        found = self._run(works, keep, forward_only=True, records=trained)
        if not found:
            return [no_scores(trainer.setup.head, entropy) for _ in works]
        return [scores_of(trainer.setup.head, work, output) for work, output in found]

    def _run(self, works: Sequence[Work], finish: Any, *, forward_only: bool, records: bool = False) -> list[Any]:
        """All micro-batches through Megatron's schedule; what `finish` left, on the last stage. `records`: what routers
        choose may be replayed later."""
        trainer = self._ready
        routing, device = trainer.routing, trainer.placement.device
        for chunk in trainer.chunks:
            chunk.train(not forward_only)

        def forward_step(source: Iterator[Work], chunk: nn.Module) -> tuple[Tensor, Any]:
            work = next(source)
            if routing is None:
                return chunk(work=work), lambda output, **told: finish(work, output, **told)
            number = next(number for number, known in enumerate(trainer.chunks) if known is chunk)
            routing.before(number, work.experts, training=not forward_only, device=device)
            output = chunk(work=work)
            if records and routing.records:
                routing.keep(number, work.micro, trainer.layout.cp_size)
            return output, lambda output, **told: finish(work, output, **told)

        sources = [iter(works) for _ in trainer.chunks]
        with torch.no_grad() if forward_only else nullcontext():
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

    def train_step(self, micros: Sequence[MicroBatch], objective: Objective) -> StepReport:
        started = time.perf_counter()
        trainer = self._ready
        device = trainer.placement.device
        entropy: EntropyMode = "none"
        if objective.wants_entropy or objective.entropy_has_gradient:
            entropy = "gradient" if objective.entropy_has_gradient else "metric"
        works = [self._prepare(micro, entropy, trainer.routing, ahead=True) for micro in micros]
        # Megatron divides gradients by the step's tokens: the objective, which already is a sum over its own
        # denominator, is multiplied by them, and auxiliary losses of Megatron's own become means over tokens.
        tokens = self._over_ranks([work.num_tokens for work in works])
        targets = self._targets_ahead(works)

        def finish(
            work: Work, output: Tensor | tuple[Tensor, Tensor]
        ) -> tuple[Tensor, Tensor, tuple[Tensor, Mapping[str, Tensor]]]:
            scored, ahead = output if isinstance(output, tuple) else (output, None)
            result = objective(
                work.micro, segments=self._segments(work.micro), **columns_of(trainer.setup.head, scored)
            )
            count = work.num_tokens.to(torch.int)
            loss, sums = result.loss, result.sums
            if ahead is not None:
                means = ahead / targets
                loss = loss + self._config.mtp_loss_scaling_factor * means.mean()
                sums = {**sums, **metrics_ahead(means.detach())}
            return loss * tokens, count, (loss.detach(), sums)

        for chunk in trainer.chunks:
            chunk.zero_grad_buffer()
        trainer.optimizer.zero_grad()
        if trainer.num_ahead:
            bring_embedding(trainer.bare)
        found = self._run(works, finish, forward_only=False)
        if trainer.num_ahead:
            drop_embedding(trainer.bare)
        loss = torch.zeros((), device=device)
        sums: dict[str, Tensor] = {}
        for part, of_micro in found:
            loss = loss + part
            for name, value in of_micro.items():
                sums[name] = sums[name] + value if name in sums else value
        set_step(trainer.schedule, trainer.steps_done)
        lr = float(trainer.optimizer.param_groups[0]["lr"])
        grad_norm, finite = is_finite_step(trainer.optimizer, loss, trainer.ranks)
        if finite:
            clip(trainer.optimizer, grad_norm)
            trainer.optimizer.step_with_ready_grads()
            trainer.steps_done += 1
        trainer.optimizer.zero_grad()
        return StepReport(
            sums={name: float(value) for name, value in sums.items()} if trainer.layout.reports else {},
            grad_norm=grad_norm,
            lr=lr,
            skipped=not finite,
            seconds=time.perf_counter() - started,
        )

    def _over_ranks(self, counts: Sequence[Tensor]) -> float:
        """Their sum over the ranks of all micro-batches."""
        trainer = self._ready
        count = torch.stack(list(counts)).sum().to(torch.float64)
        dist.all_reduce(count)
        # Every tensor and pipeline rank has counted the same tokens.
        return float(count) / (trainer.ranks.shape.tp * trainer.ranks.shape.pp)

    def _targets_ahead(self, works: Sequence[Work]) -> Tensor:
        """(K,) float32: what each layer of multi-token prediction is trained on in this step, at least 1."""
        device = self._ready.placement.device
        counts = [
            self._over_ranks([torch.tensor(len(work.ahead[depth].targets), device=device) for work in works])
            for depth in range(len(works[0].ahead))
        ]
        return torch.tensor(counts, device=device).clamp(min=1.0)

    def _prepare(
        self, micro: MicroBatch, entropy: EntropyMode, replayed: Routing | None, *, ahead: bool = False
    ) -> Work:
        """This rank's part, on the device, with the plan that is made from its offsets on the host. `ahead`: layers of
        multi-token prediction are trained, if there are any."""
        trainer, layout = self._ready, self._ready.layout
        device = trainer.placement.device
        whole = micro
        if layout.cp_size > 1:
            micro = split_micro_batch(micro, layout.cp_rank, layout.cp_size)
            segments = zigzag_part(micro.cu_seqlens, layout.cp_rank, layout.cp_size)
        else:
            segments = whole_sequences(micro.cu_seqlens)
        held = micro.num_tokens
        padding = -held % trainer.ranks.shape.tp if trainer.ranks.shape.sequence_parallel else 0
        chosen = trainer.config.dsa_indexer_topk
        # The variable-length kernel knows no choice of keys.
        dense = chosen is None or int(segments.key_lengths.max()) <= chosen
        plan = plan_attention(
            with_padding(segments, padding, held),
            nn.functional.pad(micro.position_ids, (0, padding)),
            device=device,
            varlen=device.type == "cuda" and trainer.placement.dtype != torch.float32 and dense,
            group=trainer.ranks.cp_group,
        )
        delta = None
        if trainer.config.linear_attention_freq is not None:
            delta = plan_delta(micro.cu_seqlens, padding, device=device, group=trainer.ranks.cp_group)
        tokens = nn.functional.pad(micro.tokens, (0, padding))[None].to(device)
        stands_for_none = torch.zeros(held, dtype=torch.bool)
        if layout.cp_size > 1:
            stands_for_none = padded_positions(whole.cu_seqlens, micro.cu_seqlens, layout.cp_rank, layout.cp_size)
        stands_for_none = nn.functional.pad(stands_for_none, (0, padding), value=True)[None]
        return Work(
            micro=replace(micro, routed_experts=None).to(device),
            tokens=tokens,
            plan=plan,
            delta=delta,
            padding=stands_for_none.to(device),
            entropy=entropy,
            ahead=tuple(
                ahead_of(whole, depth, layout.cp_rank, layout.cp_size, padding).to(device)
                for depth in range(1, 1 + (trainer.num_ahead if ahead else 0))
            ),
            experts=() if replayed is None else replayed.ids_of(micro),
        )

    def _segments(self, micro: MicroBatch) -> Segments:
        group = self._ready.ranks.cp_group
        if group is None:
            return LocalSegments(micro.segments, micro.num_samples)
        return ZigzagSegments(micro.segments, micro.num_samples, group)

    def _check_copy(self, name: str) -> None:
        if name not in self._ready.copies:
            raise ModelError(unknown_name("weights", name, "copy of this trainer", [ACTOR, *self._ready.copies]))

    def export_tensors(self, *, everywhere: bool = False) -> Iterator[Mapping[str, Tensor] | None]:
        trainer = self._ready
        return trainer.table.export(trainer.placement.dtype, keep=everywhere or trainer.ranks.is_first)

    def save_hf(self, folder: Path) -> None:
        trainer = self._ready
        write_folder(trainer.table, trainer.folder, folder, first=trainer.ranks.is_first, head=trainer.setup.head)
        dist.barrier()

    def save(self, folder: Path) -> None:
        self._write(folder, checkpoint.PlainSave())(None)

    def stage(self, folder: Path) -> Callable[[], None]:
        trainer = self._ready
        if trainer.saving_group is None:
            trainer.saving_group = dist.new_group(backend="gloo")
        on_host = trainer.placement.device.type == "cpu" or bool(getattr(self._config, "optimizer_cpu_offload", False))
        strategy = checkpoint.StagedSave(trains_on_host=on_host)
        return partial(self._write(folder, strategy), trainer.saving_group)

    def _write(self, folder: Path, strategy: checkpoint.PlainSave) -> checkpoint.Write:
        trainer = self._ready
        return checkpoint.write(
            folder,
            trainer.bare,
            trainer.optimizer,
            trainer.tensors,
            {name: trainer.copies[name] for name in sorted(trainer.refreshed)},
            steps_done=trainer.steps_done,
            shapes=self._shapes(),
            strategy=strategy,
        )

    def load(self, folder: Path) -> None:
        trainer = self._ready
        manifest = checkpoint.read_manifest(folder, self._shapes())
        for name in manifest.copies:
            self._check_copy(name)
        trainer.copies |= checkpoint.read(folder, manifest, trainer.bare, trainer.optimizer, trainer.tensors)
        trainer.steps_done = manifest.steps_done
        trainer.refreshed = set(manifest.copies)

    def _shapes(self) -> dict[str, Any]:
        """Of the whole model, whatever the layout."""
        trainer = self._ready
        plain = {name: value for name, value in trainer.architecture.options.items() if not callable(value)}
        return {
            **plain,
            "vocab_size": trainer.architecture.vocab_size,
            "head": trainer.setup.head,
            "optimizer": trainer.setup.optimizer.optimizer,
            "dtype": str(trainer.placement.dtype),
        }

    def refresh_copy(self, name: str) -> None:
        trainer = self._ready
        self._check_copy(name)
        trainer.copies[name] = copied(trainer.tensors)
        trainer.refreshed.add(name)

    def sleep(self, keep_weights: bool = False) -> None:
        if self._ready.placement.device.type == "cuda":
            from slime_megatron.residency import to_host

            to_host(self._ready.chunks, self._ready.optimizer, weights=not keep_weights)

    def wake(self, weights_only: bool = False) -> None:
        if self._ready.placement.device.type == "cuda":
            from slime_megatron.residency import to_device

            to_device(self._ready.chunks, self._ready.optimizer, others=not weights_only)

    def close(self) -> None:
        if self._trainer is not None:
            self._trainer.ranks.leave()
            self._trainer = None


def placement_of(options: MegatronOptions, setup: TrainerSetup) -> Placement:
    device = torch.device("cpu")
    if setup.device == "cuda":
        device = torch.device("cuda", setup.local_rank)
        torch.cuda.set_device(device)
    else:
        use_cpu()
    mend_absence()
    half = setup.device == "cuda" if options.bf16 is None else options.bf16
    dtype = torch.float16 if options.fp16 else torch.bfloat16 if half else torch.float32
    return Placement(device=device, dtype=dtype)


@torch.no_grad()
def fresh_value_head(chunk: Any, seed: int) -> None:
    """N(0, 1/(hidden + 1)), bias 0, as Stiennon et al. 2020 (arXiv 2009.01325, appendix B.1)."""
    if chunk.value_head is None:
        return
    weight = chunk.value_head.weight
    fresh = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(fresh * (weight.shape[1] + 1) ** -0.5)
    chunk.value_head.bias.zero_()


def columns_of(head: str, output: Tensor) -> dict[str, Tensor]:
    """(K, T) of the model's last stage."""
    names = ["values"] if head == "value" else ["log_probs", "entropy"][: len(output)]
    return dict(zip(names, output.unbind(0), strict=True))


def metrics_ahead(means: Tensor) -> dict[str, Tensor]:
    """Of this micro-batch's share of each layer's mean cross-entropy."""
    return {f"mtp_{depth}_loss": mean for depth, mean in enumerate(means.unbind(), 1)} | {"mtp_loss": means.sum()}


def scores_of(head: str, work: Work, output: Tensor) -> Scores:
    columns = {name: column.numpy() for name, column in columns_of(head, output).items()}
    return Scores(**columns, rows=None if work.micro.rows is None else work.micro.rows.cpu().numpy())


def no_scores(head: str, entropy: EntropyMode) -> Scores:
    """Of a stage that is not the last."""
    names = ["values"] if head == "value" else ["log_probs", *(["entropy"] if entropy != "none" else [])]
    return Scores(**{name: np.empty(0, np.float32) for name in names}, rows=np.empty(0, np.int64))
