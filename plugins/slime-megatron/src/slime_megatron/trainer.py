"""Trainer: the objects that one rank trains with, created once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

# Before any import of Megatron: see compiler.py.
from slime_megatron.compiler import no_compiler  # isort: skip

with no_compiler():
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

import torch
from torch import Tensor

from slime_core.contracts.backend import Layout
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError, ModelError
from slime_core.registry.boundary import foreign
from slime_megatron.bridges.bridge import Architecture
from slime_megatron.config import MegatronOptions, layout_of, megatron_options
from slime_megatron.cpu import use_cpu
from slime_megatron.folder import ModelFolder, open_folder
from slime_megatron.frozen_models import FrozenModels
from slime_megatron.model_chunks import Placement, build_chunks, check_copy, dtype_of, make_config, wrap
from slime_megatron.native_optimizer import native_name
from slime_megatron.offloading import Residency
from slime_megatron.optimizer import make_optimizer, make_schedule
from slime_megatron.optimizer_step import OptimizerStep
from slime_megatron.options import RECORDS, megatron_folder
from slime_megatron.process import Ranks, join
from slime_megatron.routing import Routing
from slime_megatron.scaling import finish_gradients
from slime_megatron.torch_dist_folder import load_model
from slime_megatron.torch_dist_place import torch_dist_place
from slime_megatron.transformer_engine import patch_missing_transformer_engine
from slime_megatron.unsupported_options import megatron_errors
from slime_megatron.weights import WeightTable, local_tensors
from slime_training.hooks import TRAINER_HOOKS, TrainerHooks, build_hooks
from slime_training.host_memory import HostCopy
from slime_training.process_group import CheckpointGroups, group_for_saving
from slime_training.value_head import start_value_head


@dataclass(kw_only=True)
class Trainer:
    """Created by the backend's `setup`."""

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
    frozen_models: FrozenModels
    residency: Residency
    hooks: TrainerHooks | None = None
    """None: the run has none."""
    refreshed: set[str] = field(default_factory=set)
    steps_done: int = 0
    step: OptimizerStep | None = None
    """Begun by `forward_backward`, and not taken yet."""
    staging: dict[str, HostCopy] = field(default_factory=dict)
    checkpoint_groups: CheckpointGroups = field(default_factory=lambda: CheckpointGroups(group_for_saving))


def make_trainer(options: MegatronOptions, setup: TrainerSetup) -> Trainer:
    """Joins the other ranks, and loads the weights."""
    shape = options.shape
    # Every rank checks the folders before any of them waits for another.
    folder = open_folder(setup.model_path, trust_remote_code=setup.trust_remote_code)
    architecture = folder.bridge.architecture()
    frozen_folders = open_frozen_folders(setup, architecture)
    placement = placement_of(options, setup)
    ranks = join(setup, shape)
    layout = layout_of(options, setup.rank, setup.world_size)
    torch.manual_seed(setup.seed + layout.dp_rank)
    if setup.device == "cuda":
        model_parallel_cuda_manual_seed(setup.seed)
    hooks = make_hooks(options, setup)
    setup = replace(setup, optimizer=setup.optimizer.model_copy(update={"optimizer": native_name(setup)}))
    distributed = distributes_optimizer(options, setup)
    if options.main_params_dtype == "bf16" and placement.dtype != torch.bfloat16:
        raise ConfigError('backend.main_params_dtype = "bf16": on the CPU it requires bf16 = true. Set that too.')
    given = {name: value for of in RECORDS for name, value in megatron_options(options, of).items()}
    as_config_errors = partial(megatron_errors, given, megatron_folder())
    with as_config_errors():
        config = make_config(architecture, options, shape, placement)
        bare = build_chunks(config, architecture, options, shape, placement, head=setup.head)
    table = WeightTable(bare, folder.bridge, architecture.vocab_size)
    frozen = FrozenModels(bare, placement.device)
    for name, copy in frozen_folders.items():
        if isinstance(copy, ModelFolder):
            table.load(copy)
        else:
            load_model(bare, copy)
        frozen.take(name)
    if setup.head == "value" and (head := bare[-1].value_head) is not None:
        start_value_head(head.weight, head.bias, setup.seed)
    table.load(folder, fresh=("score.weight", "score.bias") if setup.head == "value" else ())
    with as_config_errors():
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
        frozen_models=frozen,
        residency=Residency(chunks, optimizer, placement.device),
        hooks=hooks,
    )
    connect(trainer)
    return trainer


def distributes_optimizer(options: MegatronOptions, setup: TrainerSetup) -> bool:
    distributed = options.distributes_optimizer(setup.device, setup.optimizer.optimizer)
    if distributed and setup.optimizer.optimizer != "adam":
        raise ConfigError("backend.use_distributed_optimizer = true: requires train.optimizer = adam.")
    return distributed


def make_hooks(options: MegatronOptions, setup: TrainerSetup) -> TrainerHooks | None:
    """Builds the hooks, and calls `after_init`."""
    if options.hooks is None:
        return None
    hooks: TrainerHooks = build_hooks(TRAINER_HOOKS, options.hooks, where="backend.hooks")
    with foreign(hooks, "after_init"):
        hooks.after_init(setup, {name: getattr(options, name) for name in type(options).model_fields})
    return hooks


def open_frozen_folders(setup: TrainerSetup, architecture: Architecture) -> dict[str, ModelFolder | Path]:
    """The folder of each frozen model, or its state in torch_dist, by its name. Raises ModelError for a model of another
    architecture; that of a state is known when it is loaded."""
    folders: dict[str, ModelFolder | Path] = {}
    for name, path in setup.frozen_models.items():
        if setup.head != "lm":
            raise ModelError(f'weights "{name}": a critic has no frozen copies.')
        if (state := torch_dist_place(path)) is not None:
            folders[name] = state
            continue
        folder = open_folder(path, trust_remote_code=setup.trust_remote_code)
        check_copy(name, architecture, folder.bridge.architecture())
        folders[name] = folder
    return folders


def connect(trainer: Trainer) -> None:
    """Sets the functions that Megatron's schedules call."""
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
    patch_missing_transformer_engine()
    return Placement(device=device, dtype=dtype_of(options, setup.device))
