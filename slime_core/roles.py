"""Roles: the ranks of every model that the run trains, started and set up."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from slime_core.batch.flops import ModelShape
from slime_core.batch.plan import MicroBatchLimits
from slime_core.config.bound import BoundRun
from slime_core.config.roles import BoundRole
from slime_core.contracts.backend import Layout, TrainerSetup
from slime_core.contracts.transport import SenderSetup
from slime_core.errors import ConfigError
from slime_core.launch.devices import Devices
from slime_core.launch.launcher import Launcher
from slime_core.launch.trainers import TrainerLimits, Trainers
from slime_core.materials import Materials
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_format import EngineFormat
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.profile import ProfilePlan
from slime_core.workers.trainer import TrainWorkerSpec


async def start_roles(
    run: BoundRun, materials: Materials, launcher: Launcher, agreement: Agreement, device: str, run_dir: Path
) -> dict[str, Trainers]:
    """The ranks of every trained role, set up, by the role's name. `run_dir`: for what a weight transport writes."""
    started = {}
    for sharing in sharing_devices(run.roles):
        with_engines = run.config.launcher.colocate and not sharing[0].own_devices
        offload = run.config.launcher.offload_train
        if offload is None:
            offload = device == "cuda" and (len(sharing) > 1 or with_engines)
        devices = Devices(offload=offload)
        specs = [worker_specs(run, role, materials, agreement, device, run_dir) for role in sharing]
        handles = iter(await launcher.start_trainers([spec for of_role in specs for spec in of_role]))
        for role in sharing:
            ranks = list(itertools.islice(handles, role.num_ranks))
            layouts: list[Layout] = list(await asyncio.gather(*(rank.call("setup") for rank in ranks)))
            trainers = Trainers(
                launcher,
                ranks,
                layouts,
                limits=trainer_limits(run, layouts[0]),
                shape=ModelShape.from_config(materials.role_configs[role.name]),
                devices=devices,
            )
            await devices.settle(trainers)
            started[role.name] = trainers
    return {role.name: started[role.name] for role in run.roles}


def sharing_devices(roles: Sequence[BoundRole]) -> list[list[BoundRole]]:
    """Roles by the devices that they stand on, the policy's first."""
    shared = [role for role in roles if not role.own_devices]
    return [shared, *([role] for role in roles if role.own_devices)]


def worker_specs(
    run: BoundRun, role: BoundRole, materials: Materials, agreement: Agreement, device: str, run_dir: Path
) -> list[TrainWorkerSpec]:
    config = run.config
    on: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"
    debug = config.debug
    if debug.record_memory_history and on == "cpu":
        raise ConfigError("debug.record_memory_history: there is no CUDA device, and only its memory is recorded.")
    profile = ProfilePlan(
        folder=run_dir / "profile",
        targets=debug.profile_target if debug.use_pytorch_profiler else (),
        first=debug.profile_step_start,
        end=debug.profile_step_end,
        memory=debug.record_memory_history,
        memory_steps=debug.memory_snapshot_num_steps,
    )
    # The engines serve the policy.
    transport = run.transport if role.name == run.roles[0].name else None
    engine_format = None
    if transport is not None and materials.converter is not None:
        engine_format = EngineFormat(converter=materials.converter.spec(), folder=run.engine_folder)
    return [
        TrainWorkerSpec(
            agreement=agreement,
            backend=role.backend.spec(),
            objective=ObjectiveSpec.of(role),
            temperature=config.rollout.rollout_temperature if role.loss.driver.uses_advantages else 1.0,
            profile=profile,
            transport=None if transport is None else transport.spec(),
            engine_format=engine_format,
            setup=TrainerSetup(
                role=role.name,
                rank=rank,
                world_size=role.num_ranks,
                local_rank=rank % role.ranks_per_node,
                rendezvous="",
                device=on,
                model_path=role.model_path,
                head=role.head,
                copies=role.copies,
                optimizer=role.optimizer,
                total_steps=max(1, (materials.num_rollout - role.plan.idle_steps) * run.steps_per_rollout),
                seed=config.seed,
                trust_remote_code=config.model.trust_remote_code,
                routing_replay=role.plan.routing_replay,
                true_on_policy=role.head == "lm" and run.algo.keys.true_on_policy_mode,
            ),
            sender=SenderSetup(
                rank=rank,
                world_size=role.num_ranks,
                device=on,
                model_path=role.model_path,
                run_dir=run_dir,
                colocated=config.launcher.colocate,
            ),
        )
        for rank in range(role.num_ranks)
    ]


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
