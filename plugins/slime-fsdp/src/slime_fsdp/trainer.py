"""Trainer: the objects that one rank trains with, created once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slime_core.contracts.backend import Layout
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.setup import TrainerSetup
from slime_core.errors import ConfigError
from slime_fsdp.adapters import values_without_effect
from slime_fsdp.config import FsdpConfig, layout_of
from slime_fsdp.folder import ModelFolder, open_folder
from slime_fsdp.freed_memory import keep_freed_memory
from slime_fsdp.held_adapters import HeldAdapters
from slime_fsdp.optimizer import make_optimizer
from slime_fsdp.optimizer_step import OptimizerStep
from slime_fsdp.packed_model import PackedModel, Placement, build_model
from slime_fsdp.process import Ranks, join
from slime_fsdp.sharding import Sharding
from slime_fsdp.staging import Staging
from slime_training.chosen_optimizer import chosen_optimizer
from slime_training.offload import TrainerOffloader
from slime_training.process_group import CheckpointGroups


@dataclass(kw_only=True)
class Trainer:
    """Created by the backend's `setup`."""

    setup: TrainerSetup
    layout: Layout
    ranks: Ranks
    placement: Placement
    folder: ModelFolder
    model: PackedModel
    optimizer: torch.optim.Optimizer
    optimizer_driver: type[OptimizerDriver]
    frozen_models: dict[str, PackedModel]
    adapter_copies: dict[str, dict[str, Tensor]]
    """Copies of the folder that adapters are trained on: only the adapters, for the same base."""
    refreshed: set[str]
    steps_done: int = 0
    step: OptimizerStep | None = None
    """Begun by `forward_backward`, and not taken yet."""
    adapters: HeldAdapters | None = None
    """None: the weights are trained themselves."""
    base_copies: frozenset[str] = frozenset()
    """Frozen copies that are the base of the adapters."""
    offloader: TrainerOffloader
    staging: Staging | None = None
    checkpoint_groups: CheckpointGroups

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


def make_trainer(config: FsdpConfig, setup: TrainerSetup) -> Trainer:
    """Joins the other ranks, and loads the weights."""
    # Every rank checks the folders before any of them waits for another.
    trust = setup.trust_remote_code
    folder = open_folder(setup.model_path, head=setup.head, trust_remote_code=trust)
    copy_folders = {name: open_folder(path, trust_remote_code=trust) for name, path in setup.frozen_models.items()}
    device = torch.device("cpu")
    if setup.device == "cuda":
        device = torch.device("cuda", setup.local_rank)
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    sharding = Sharding.of(config, setup.device, setup.world_size)
    if config.main_params_dtype == "bf16" and sharding.compute != torch.bfloat16:
        raise ConfigError(
            'backend.main_params_dtype = "bf16": on the CPU it requires precision = "bfloat16". Set that too.'
        )
    ranks = join(setup, cp_size=config.context_parallel_size, needs_mesh=sharding.sharded)
    placement = Placement(
        device=device,
        mesh=ranks.mesh,
        compute_dtype=sharding.compute,
        cpu_offload=sharding.offloaded,
        true_on_policy=setup.true_on_policy,
    )
    layout = layout_of(config, setup.rank, setup.world_size)
    torch.manual_seed(setup.seed + layout.dp_rank)
    model = build_model(folder, config, placement, seed=setup.seed, trained=True)
    on_base = {
        name
        for name, copy in copy_folders.items()
        if config.freezes_base and setup.head == "lm" and copy.path.resolve() == folder.path.resolve()
    }
    chosen = chosen_optimizer(setup)
    return Trainer(
        setup=setup,
        layout=layout,
        ranks=ranks,
        placement=placement,
        folder=folder,
        model=model,
        optimizer=make_optimizer(model, chosen, setup.optimizer, config),
        optimizer_driver=chosen.driver,
        frozen_models={
            name: build_model(copy, config, placement, seed=setup.seed, trained=False)
            for name, copy in copy_folders.items()
            if name not in on_base
        },
        adapter_copies={name: values_without_effect(model.model) for name in sorted(on_base) if model.adapters},
        base_copies=frozenset(on_base if config.max_adapters else ()),
        refreshed=set(),
        offloader=TrainerOffloader(device),
        checkpoint_groups=CheckpointGroups(ranks.group_for_saving),
        adapters=HeldAdapters.of(model.model, folder.path, config, device, chosen, setup.optimizer)
        if config.max_adapters
        else None,
    )
