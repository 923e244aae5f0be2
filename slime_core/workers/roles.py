"""Roles: the ranks of every model that the run trains, started and set up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.micro_batches import MicroBatchLimits
from slime_core.config.bound import BoundRun
from slime_core.config.roles import BoundRole
from slime_core.contracts.backend import Layout
from slime_core.workers.devices import Devices
from slime_core.workers.launcher import Launcher
from slime_core.workers.limited_rank import limited
from slime_core.workers.role_specs import RoleSpecs
from slime_core.workers.stopwatch import StartTimes
from slime_core.workers.train_group import TrainerLimits, TrainGroup


async def start_roles(
    roles: RoleSpecs, launcher: Launcher, model_configs: Mapping[str, Mapping[str, Any]], times: StartTimes
) -> dict[str, TrainGroup]:
    """The ranks of every trained role, set up, by the role's name. `model_configs`: config.json of each role's model."""
    run, started = roles.run, {}
    for sharing in sharing_devices(run.roles):
        with_engines = run.config.launcher.colocate and not sharing[0].own_devices
        offload = run.config.launcher.offload_train
        if offload is None:
            offload = roles.device == "cuda" and (len(sharing) > 1 or with_engines)
        devices = Devices(offload=offload)
        specs = [roles.of_role(role) for role in sharing]
        with times.of("trainer/imports"):
            handles = iter(await launcher.start_trainers([spec for of_role in specs for spec in of_role]))
        for role in sharing:
            ranks = list(itertools.islice(handles, role.num_ranks))
            ranks = limited(ranks, role.name, run.config.train.rank_call_timeout)
            with times.of("trainer/load"):
                layouts: list[Layout] = list(await asyncio.gather(*(rank.call("setup") for rank in ranks)))
            trainers = TrainGroup(
                launcher,
                ranks,
                layouts,
                limits=trainer_limits(run, layouts[0]),
                shape=ModelShape.from_config(model_configs[role.name]),
                devices=devices,
            )
            await devices.settle(trainers)
            started[role.name] = trainers
    return {role.name: started[role.name] for role in run.roles}


def sharing_devices(roles: Sequence[BoundRole]) -> list[list[BoundRole]]:
    """Roles by the devices that they share, the policy's first."""
    shared = [role for role in roles if not role.own_devices]
    return [shared, *([role] for role in roles if role.own_devices)]


def trainer_limits(run: BoundRun, layout: Layout) -> TrainerLimits:
    train = run.config.train

    def limits(max_tokens: int) -> MicroBatchLimits:
        return MicroBatchLimits(
            max_tokens=max_tokens * layout.cp_size if train.use_dynamic_batch_size else None,
            max_samples=train.micro_batch_size,
            multiple=layout.micro_batch_multiple,
        )

    return TrainerLimits(
        train=limits(train.max_tokens_per_gpu),
        score=limits(train.log_probs_max_tokens_per_gpu or train.max_tokens_per_gpu),
        balance=train.balance_data,
    )
