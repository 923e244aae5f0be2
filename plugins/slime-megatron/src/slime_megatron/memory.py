"""Estimates what a rank holds: parameters and states are counted on pieces of the model that are built on the meta device, for
the ranks of a fake process group; activations are an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Before any import of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core import parallel_state

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_core.errors import ConfigError
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.config import MegatronOptions, megatron_options
from slime_megatron.cpu import use_cpu
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.model_chunks import Placement, build_chunks, dtype_of, make_config
from slime_megatron.native_optimizer import native_name
from slime_megatron.options import RECORDS, megatron_folder
from slime_megatron.process import init_model_parallel
from slime_megatron.transformer_engine import patch_missing_transformer_engine
from slime_megatron.unsupported_options import megatron_errors
from slime_training.footprint import DecoderShape, head_work, kept_per_token, not_counted, not_estimated_activations
from slime_training.memory_plan import AWAKE, MemoryItem, MemoryPhase, TrainerLoad, TrainerMemory, peak_of
from slime_training.rounded_adamw import STORED

BACKWARD = frozenset({MemoryPhase.LOSS, MemoryPhase.BACKWARD})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Elements that a rank of a pipeline stage holds."""

    number: int
    dense: int
    experts: int
    trained_dense: int
    trained_experts: int
    layers: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The values of the options for these ranks."""

    options: MegatronOptions
    load: TrainerLoad
    dtype: torch.dtype
    distributed: bool

    @classmethod
    def of(cls, options: MegatronOptions, load: TrainerLoad) -> Plan:
        setup = load.setup
        return cls(
            options=options,
            load=load,
            dtype=dtype_of(options, setup.device),
            distributed=options.distributes_optimizer(setup.device, native_name(setup)),
        )

    def of_optimizer(self, stage: Stage) -> int:
        """Elements whose optimizer state this rank has."""
        if not self.distributed:
            return stage.trained_dense + stage.trained_experts
        shape, world = self.options.shape, self.load.setup.world_size
        dense, experts = world // (shape.tp * shape.pp), world // (shape.etp * shape.ep * shape.pp)
        return -(-stage.trained_dense // dense) + -(-stage.trained_experts // experts)


def memory_of(options: MegatronOptions, load: TrainerLoad) -> TrainerMemory:
    """See `BackendDriver.memory`. Returns the pipeline stage that holds the most."""
    setup = load.setup
    folder = open_folder(setup.model_path, trust_remote_code=setup.trust_remote_code, weights=False)
    plan = Plan.of(options, load)
    of_stages = [
        [*states(plan, stage), *frozen_models(plan, stage), *activations(plan, stage, folder)]
        for stage in stages_of(plan, folder)
    ]
    most = max(of_stages, key=lambda lines: peak_of(lines)[1])
    return TrainerMemory(lines=tuple(most), not_estimated=not_estimated_activations(folder.raw))


def stages_of(plan: Plan, folder: ModelFolder) -> list[Stage]:
    """Stages, counted on the first rank of each."""
    shape, world = plan.options.shape, plan.load.setup.world_size
    return [
        counted(plan, folder.bridge.architecture(), rank=number * world // shape.pp, number=number)
        for number in range(shape.pp)
    ]


def counted(plan: Plan, architecture: Architecture, *, rank: int, number: int) -> Stage:
    use_cpu()
    patch_missing_transformer_engine()
    options, shape = plan.options, plan.options.shape
    on_meta = Placement(device=torch.device("meta"), dtype=plan.dtype)
    given = {name: value for of in RECORDS for name, value in megatron_options(options, of).items()}
    as_config_errors = megatron_errors(given, megatron_folder())
    with as_config_errors, laid_out(options, rank, plan.load.setup.world_size), torch.device("meta"):
        config = make_config(architecture, options, shape, on_meta)
        pieces: list[Any] = build_chunks(config, architecture, options, shape, on_meta, head=plan.load.setup.head)
    parameters = [parameter for piece in pieces for parameter in piece.parameters()]

    def elements(*, experts: bool, trained: bool) -> int:
        # Megatron's mark of parameters that are sharded over the experts' own groups.
        return sum(
            parameter.numel()
            for parameter in parameters
            if getattr(parameter, "allreduce", True) != experts and (parameter.requires_grad or not trained)
        )

    return Stage(
        number=number,
        dense=elements(experts=False, trained=False),
        experts=elements(experts=True, trained=False),
        trained_dense=elements(experts=False, trained=True),
        trained_experts=elements(experts=True, trained=True),
        layers=sum(len(piece.decoder.layers) for piece in pieces),
        last=number == shape.pp - 1,
    )


@contextmanager
def laid_out(options: MegatronOptions, rank: int, world_size: int) -> Iterator[None]:
    """Creates Megatron's groups of one rank among others that do not exist: nothing is ever sent."""
    if dist.is_initialized():
        raise ConfigError(
            "backend megatron: memory is estimated in a separate process, and this one is a rank of a trainer."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        init_model_parallel(options.shape, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def states(plan: Plan, stage: Stage) -> Iterator[MemoryItem]:
    """Weights, gradients and the optimizer's state: exact."""
    options, resting = plan.options, AWAKE - {MemoryPhase.SYNC}
    element = plan.dtype.itemsize
    yield MemoryItem(component="weights", num_bytes=element * (stage.dense + stage.experts), moments=AWAKE)
    wide = 4 if getattr(options, "grad_reduce_in_fp32", None) in (None, True) else element
    size = wide * (stage.trained_dense + stage.trained_experts)
    yield MemoryItem(component="gradients", num_bytes=size, moments=resting, moves=False)
    held = plan.of_optimizer(stage)
    if plan.dtype != torch.float32 and options.main_params_dtype == "fp32":
        yield MemoryItem(component="main weights", num_bytes=4 * held, moments=resting, note="float32")
    if native_name(plan.load.setup) != "adam":
        return
    offloaded = bool(getattr(options, "optimizer_cpu_offload", None))
    place: Any = "host" if offloaded else "device"
    for component, name in (("first moment", options.exp_avg_dtype), ("second moment", options.exp_avg_sq_dtype)):
        size = (STORED[name].itemsize if options.rounds_state else 4) * held
        yield MemoryItem(component=component, num_bytes=size, moments=resting, place=place)
    if offloaded:
        yield MemoryItem(component="weights and gradients to step on", num_bytes=8 * held, moments=AWAKE, place="host")


def frozen_models(plan: Plan, stage: Stage) -> Iterator[MemoryItem]:
    """Copies on the host, with room for the trained weights while a copy is in the model."""
    size = plan.dtype.itemsize * (stage.dense + stage.experts)
    for name in plan.load.setup.frozen_models:
        yield MemoryItem(component=f"copy: {name}", num_bytes=size, moments=AWAKE, place="host")
    if plan.load.setup.frozen_models:
        yield MemoryItem(component="trained weights, put aside", num_bytes=size, moments=AWAKE, place="host")


def activations(plan: Plan, stage: Stage, folder: ModelFolder) -> Iterator[MemoryItem]:
    """Estimates; none for layers whose tensors were not counted."""
    if not_counted(folder.raw) is not None:
        return
    options, load, shape = plan.options, plan.load, plan.options.shape
    normed = bool(folder.bridge.architecture().options.get("qk_layernorm"))
    sizes, element = DecoderShape.of(folder.raw, normed=normed), plan.dtype.itemsize
    kept = kept_per_token(
        sizes,
        element=element,
        fused=load.setup.device == "cuda",
        split_copies=True,
        tensor_parallel=shape.tp,
        sequence_parallel=shape.sequence_parallel,
        context_parallel=shape.cp,
    )
    again, group = recomputed_layers(options, stage.layers)
    held = (stage.layers - again) * kept.whole + -(-again // group) * kept.checkpoint
    yield MemoryItem(
        component="activations",
        num_bytes=held * load.tokens * in_flight(plan, stage) // shape.vpp,
        moments=BACKWARD,
        estimate=True,
        note=f"{again} of {stage.layers} layers are computed again" if again else "",
    )
    # If the last layer keeps everything, the first of the recomputed layers comes when much memory has been freed.
    more = group * kept.whole if again == stage.layers else 0
    yield MemoryItem(
        component="one layer at work",
        num_bytes=(more + kept.work) * load.tokens,
        moments=frozenset({MemoryPhase.BACKWARD}),
        estimate=True,
    )
    yield MemoryItem(
        component="one layer at work",
        num_bytes=kept.forward * load.scored_tokens,
        moments=frozenset({MemoryPhase.SCORE}),
        estimate=True,
    )
    if not stage.last or load.setup.head != "lm":
        return
    vocab = -(-sizes.vocab // shape.tp)
    for tokens, moment in ((load.tokens, MemoryPhase.LOSS), (load.scored_tokens, MemoryPhase.SCORE)):
        work = head_work(
            tokens=tokens,
            hidden=sizes.hidden,
            vocab=vocab,
            asked_chunk=options.log_probs_chunk_size,
            element=element,
            fused=load.setup.device == "cuda",
        )
        size = work.loss if moment is MemoryPhase.LOSS else work.forward
        yield MemoryItem(component="head in chunks", num_bytes=size, moments=frozenset({moment}), estimate=True)
    yield MemoryItem(
        component="the head's gradient",
        num_bytes=element * vocab * sizes.hidden,
        moments=frozenset({MemoryPhase.BACKWARD, MemoryPhase.REDUCE}),
        estimate=True,
    )


def recomputed_layers(options: MegatronOptions, layers: int) -> tuple[int, int]:
    """Number of recomputed layers of a stage, and the number of layers per recomputed block, of which only the input is
    kept."""
    if getattr(options, "recompute_granularity", None) != "full":
        return 0, 1
    asked = getattr(options, "recompute_num_layers", None) or 1
    if getattr(options, "recompute_method", None) == "block":
        return min(asked * options.shape.vpp, layers), 1
    return layers, asked


def in_flight(plan: Plan, stage: Stage) -> int:
    """Micro-batches whose activations a stage holds at once, counted in its pieces of the model (one, or one for each virtual
    stage), from the warm-up of Megatron's schedules."""
    shape, micros = plan.options.shape, plan.load.num_micro_batches
    behind = shape.pp - stage.number - 1
    if shape.vpp == 1:
        return min(behind + 1, micros)
    return min(2 * behind + (shape.vpp - 1) * shape.pp + 1, micros * shape.vpp)
