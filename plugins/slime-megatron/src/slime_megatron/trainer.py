"""Trainer: what one rank trains with, as it is set up once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

# Before any of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.contracts.backend import Layout
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError, ModelError
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.chunks import Placement, build_chunks, check_copy, dtype_of, make_config, wrap
from slime_megatron.config import MegatronOptions, layout_of, megatron_options
from slime_megatron.copies import Copies
from slime_megatron.cpu import use_cpu
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.native_optimizer import native_name
from slime_megatron.optimizer import make_optimizer, make_schedule
from slime_megatron.options import RECORDS, megatron_folder
from slime_megatron.process import Ranks, join
from slime_megatron.refusals import told_by_megatron
from slime_megatron.residency import Residency
from slime_megatron.routing import Routing
from slime_megatron.scaling import finish_gradients
from slime_megatron.transformer_engine import mend_absence
from slime_megatron.weights import WeightTable, local_tensors
from slime_training.host_memory import HostCopy


@dataclass(kw_only=True)
class Trainer:
    """What the backend's `setup` makes."""

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
    copies: Copies
    residency: Residency
    refreshed: set[str] = field(default_factory=set)
    steps_done: int = 0
    staging: dict[str, HostCopy] = field(default_factory=dict)
    saving_group: dist.ProcessGroup | None = None
    staging_group: dist.ProcessGroup | None = None
    """Of the thread that writes what was staged."""


def make_trainer(options: MegatronOptions, setup: TrainerSetup) -> Trainer:
    """Joins the other ranks, and loads the weights."""
    shape = options.shape
    # Every rank looks at the folders before any of them waits for another.
    folder = open_folder(setup.model_path, trust_remote_code=setup.trust_remote_code)
    architecture = folder.bridge.architecture()
    copies = {name: open_folder(path, trust_remote_code=setup.trust_remote_code) for name, path in setup.copies.items()}
    for name, copy in copies.items():
        if setup.head != "lm":
            raise ModelError(f'weights "{name}": a critic has no frozen copies.')
        check_copy(name, architecture, copy.bridge.architecture())
    placement = placement_of(options, setup)
    ranks = join(setup, shape)
    layout = layout_of(options, setup.rank, setup.world_size)
    torch.manual_seed(setup.seed + layout.dp_rank)
    if setup.device == "cuda":
        model_parallel_cuda_manual_seed(setup.seed)
    setup = replace(setup, optimizer=setup.optimizer.model_copy(update={"optimizer": native_name(setup)}))
    distributed = options.distributes_optimizer(setup.device, setup.optimizer.optimizer)
    if distributed and setup.optimizer.optimizer != "adam":
        raise ConfigError("backend.use_distributed_optimizer = true: only for train.optimizer = adam.")
    if options.main_params_dtype == "bf16" and placement.dtype != torch.bfloat16:
        raise ConfigError('backend.main_params_dtype = "bf16": on the CPU it needs bf16 = true too.')
    given = {name: value for of in RECORDS for name, value in megatron_options(options, of).items()}
    refused = partial(told_by_megatron, given, megatron_folder())
    with refused():
        config = make_config(architecture, options, shape, placement)
        bare = build_chunks(config, architecture, options, shape, placement, head=setup.head)
    table = WeightTable(bare, folder.bridge, architecture.vocab_size)
    frozen = Copies(bare, placement.device)
    for name, copy in copies.items():
        table.load(copy)
        frozen.take(name)
    if setup.head == "value":
        fresh_value_head(bare[-1], setup.seed)
    table.load(folder, fresh=("score.weight", "score.bias") if setup.head == "value" else ())
    with refused():
        chunks = wrap(bare, config, options, placement, distributed_optimizer=distributed)
        optimizer = make_optimizer(chunks, setup.optimizer, options, placement, distributed=distributed)
    trainer = Trainer(
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
        copies=frozen,
        residency=Residency(chunks, optimizer, placement.device),
    )
    connect(trainer)
    return trainer


def connect(trainer: Trainer) -> None:
    """What Megatron's schedules call."""
    config = trainer.config
    config.finalize_model_grads_func = finish_gradients
    if trainer.chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in trainer.chunks]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]


def placement_of(options: MegatronOptions, setup: TrainerSetup) -> Placement:
    device = torch.device("cpu")
    if setup.device == "cuda":
        device = torch.device("cuda", setup.local_rank)
        torch.cuda.set_device(device)
    else:
        use_cpu()
    mend_absence()
    return Placement(device=device, dtype=dtype_of(options, setup.device))


@torch.no_grad()
def fresh_value_head(chunk: Any, seed: int) -> None:
    """N(0, 1/(hidden + 1)), bias 0, as Stiennon et al. 2020 (arXiv 2009.01325, appendix B.1)."""
    if chunk.value_head is None:
        return
    weight = chunk.value_head.weight
    fresh = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
    weight.copy_(fresh * (weight.shape[1] + 1) ** -0.5)
    chunk.value_head.bias.zero_()
