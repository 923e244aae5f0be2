"""What a rank holds: parameters and states counted on pieces of the model that are built on the meta device, for the ranks of a
group that is none; activations as an estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Before any of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core import parallel_state

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_core.errors import ConfigError
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.chunks import Placement, build_chunks, dtype_of, make_config
from slime_megatron.config import MegatronOptions, megatron_options
from slime_megatron.cpu import use_cpu
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.native_optimizer import native_name
from slime_megatron.options import RECORDS, megatron_folder
from slime_megatron.process import lay_out
from slime_megatron.refusals import told_by_megatron
from slime_megatron.transformer_engine import mend_absence
from slime_training.footprint import DecoderShape, head_work, kept_per_token, not_counted, untold_activations
from slime_training.memory_plan import AWAKE, MemoryLine, Moment, TrainerLoad, TrainerMemory, peak_of
from slime_training.rounded_adamw import STORED

BACKWARD = frozenset({Moment.LOSS, Moment.BACKWARD})


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a rank of a pipeline stage holds, in elements."""

    number: int
    dense: int
    experts: int
    trained_dense: int
    trained_experts: int
    layers: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the options come to for these ranks."""

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
        """Elements whose state this rank has."""
        if not self.distributed:
            return stage.trained_dense + stage.trained_experts
        shape, world = self.options.shape, self.load.setup.world_size
        dense, experts = world // (shape.tp * shape.pp), world // (shape.etp * shape.ep * shape.pp)
        return -(-stage.trained_dense // dense) + -(-stage.trained_experts // experts)


def memory_of(options: MegatronOptions, load: TrainerLoad) -> TrainerMemory:
    """See `BackendDriver.memory`. Of the stage of the pipeline that holds most."""
    setup = load.setup
    folder = open_folder(setup.model_path, trust_remote_code=setup.trust_remote_code, weights=False)
    plan = Plan.of(options, load)
    told = [
        [*states(plan, stage), *copies(plan, stage), *activations(plan, stage, folder)]
        for stage in stages_of(plan, folder)
    ]
    most = max(told, key=lambda lines: peak_of(lines)[1])
    return TrainerMemory(lines=tuple(most), untold=untold_activations(folder.raw))


def stages_of(plan: Plan, folder: ModelFolder) -> list[Stage]:
    """Counted on the first rank of each."""
    shape, world = plan.options.shape, plan.load.setup.world_size
    return [
        counted(plan, folder.bridge.architecture(), rank=number * world // shape.pp, number=number)
        for number in range(shape.pp)
    ]


def counted(plan: Plan, architecture: Architecture, *, rank: int, number: int) -> Stage:
    use_cpu()
    mend_absence()
    options, shape = plan.options, plan.options.shape
    on_meta = Placement(device=torch.device("meta"), dtype=plan.dtype)
    given = {name: value for of in RECORDS for name, value in megatron_options(options, of).items()}
    refused = told_by_megatron(given, megatron_folder())
    with refused, laid_out(options, rank, plan.load.setup.world_size), torch.device("meta"):
        config = make_config(architecture, options, shape, on_meta)
        pieces: list[Any] = build_chunks(config, architecture, options, shape, on_meta, head=plan.load.setup.head)
    parameters = [parameter for piece in pieces for parameter in piece.parameters()]

    def elements(*, experts: bool, trained: bool) -> int:
        # Megatron's mark of what the ranks of the experts' own groups share.
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
    """Megatron's groups of a rank among others that do not exist: nothing is ever sent."""
    if dist.is_initialized():
        raise ConfigError(
            "backend megatron: memory is counted in a process of its own, and this one is a rank of a trainer."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        lay_out(options.shape, create_gloo_process_groups=False)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def states(plan: Plan, stage: Stage) -> Iterator[MemoryLine]:
    """Weights, gradients and what the optimiser holds: exact."""
    options, resting = plan.options, AWAKE - {Moment.SYNC}
    element = plan.dtype.itemsize
    yield MemoryLine(component="weights", num_bytes=element * (stage.dense + stage.experts), moments=AWAKE)
    wide = 4 if getattr(options, "grad_reduce_in_fp32", None) in (None, True) else element
    size = wide * (stage.trained_dense + stage.trained_experts)
    yield MemoryLine(component="gradients", num_bytes=size, moments=resting, moves=False)
    held = plan.of_optimizer(stage)
    if plan.dtype != torch.float32 and options.main_params_dtype == "fp32":
        yield MemoryLine(component="main weights", num_bytes=4 * held, moments=resting, note="float32")
    if native_name(plan.load.setup) != "adam":
        return
    offloaded = bool(getattr(options, "optimizer_cpu_offload", None))
    place: Any = "host" if offloaded else "device"
    for component, name in (("first moment", options.exp_avg_dtype), ("second moment", options.exp_avg_sq_dtype)):
        size = (STORED[name].itemsize if options.rounds_state else 4) * held
        yield MemoryLine(component=component, num_bytes=size, moments=resting, place=place)
    if offloaded:
        yield MemoryLine(component="weights and gradients to step on", num_bytes=8 * held, moments=AWAKE, place="host")


def copies(plan: Plan, stage: Stage) -> Iterator[MemoryLine]:
    """On the host, with a place for the trained weights while one of them is scored with."""
    size = plan.dtype.itemsize * (stage.dense + stage.experts)
    for name in plan.load.setup.copies:
        yield MemoryLine(component=f"copy: {name}", num_bytes=size, moments=AWAKE, place="host")
    if plan.load.setup.copies:
        yield MemoryLine(component="trained weights, put aside", num_bytes=size, moments=AWAKE, place="host")


def activations(plan: Plan, stage: Stage, folder: ModelFolder) -> Iterator[MemoryLine]:
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
    yield MemoryLine(
        component="activations",
        num_bytes=held * load.tokens * in_flight(plan, stage) // shape.vpp,
        moments=BACKWARD,
        estimate=True,
        note=f"{again} of {stage.layers} layers are computed again" if again else "",
    )
    # Where the last layer keeps everything, the first of those that are computed again comes when much is given back.
    more = group * kept.whole if again == stage.layers else 0
    yield MemoryLine(
        component="one layer at work",
        num_bytes=(more + kept.work) * load.tokens,
        moments=frozenset({Moment.BACKWARD}),
        estimate=True,
    )
    yield MemoryLine(
        component="one layer at work",
        num_bytes=kept.forward * load.scored_tokens,
        moments=frozenset({Moment.SCORE}),
        estimate=True,
    )
    if not stage.last or load.setup.head != "lm":
        return
    vocab = -(-sizes.vocab // shape.tp)
    for tokens, moment in ((load.tokens, Moment.LOSS), (load.scored_tokens, Moment.SCORE)):
        work = head_work(
            tokens=tokens,
            hidden=sizes.hidden,
            vocab=vocab,
            asked_chunk=options.log_probs_chunk_size,
            element=element,
            fused=load.setup.device == "cuda",
        )
        size = work.loss if moment is Moment.LOSS else work.forward
        yield MemoryLine(component="head in chunks", num_bytes=size, moments=frozenset({moment}), estimate=True)
    yield MemoryLine(
        component="the head's gradient",
        num_bytes=element * vocab * sizes.hidden,
        moments=frozenset({Moment.BACKWARD, Moment.REDUCE}),
        estimate=True,
    )


def recomputed_layers(options: MegatronOptions, layers: int) -> tuple[int, int]:
    """How many of a stage's, and of how many together only the input is kept."""
    if getattr(options, "recompute_granularity", None) != "full":
        return 0, 1
    asked = getattr(options, "recompute_num_layers", None) or 1
    if getattr(options, "recompute_method", None) == "block":
        return min(asked * options.shape.vpp, layers), 1
    return layers, asked


def in_flight(plan: Plan, stage: Stage) -> int:
    """Micro-batches whose activations a stage holds at once, counted in its pieces of the model (one, or one for each virtual
    stage): as Megatron's schedules warm up."""
    shape, micros = plan.options.shape, plan.load.num_micro_batches
    behind = shape.pp - stage.number - 1
    if shape.vpp == 1:
        return min(behind + 1, micros)
    return min(2 * behind + (shape.vpp - 1) * shape.pp + 1, micros * shape.vpp)
