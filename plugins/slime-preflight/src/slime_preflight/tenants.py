"""Tenants: the roles and engines of a run, their devices, and the memory that each declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import BoundRole
from slime_core.contracts.setup import EngineSetup, TrainerSetup
from slime_core.data.model_folder import NO_LIMIT, context_length, read_model_config
from slime_core.workers.roles import sharing_devices
from slime_preflight.step import MicroBatches, Step, micro_batches_of
from slime_training.footprint import num_parameters
from slime_training.memory_plan import (
    EngineLoad,
    EngineMemory,
    EnginePlanner,
    MemoryItem,
    TrainerLoad,
    TrainerMemory,
    TrainerPlanner,
    TransportMemory,
    TransportPlanner,
)

POLICY: Final = "policy"
"""The engines that are not a row of the engines table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRole:
    """A trained model."""

    name: str
    backend: str
    num_ranks: int
    ranks_per_machine: int
    micro_batches: MicroBatches
    memory: TrainerMemory | None
    """Memory of the rank that holds most; None: its backend has no estimate."""
    savers: Sequence[Mapping[str, Any]]
    """Options of its backend that may lower it."""

    @property
    def lines(self) -> tuple[MemoryItem, ...]:
        return () if self.memory is None else self.memory.lines


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngines:
    """Engines of one model."""

    name: str
    engine: str
    num_engines: int
    devices_each: int
    nodes_each: int
    longest_request: int
    """Tokens of prompt and response."""
    memory: EngineMemory | None
    """Memory of one device; None: the engine has no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is planned for; it need not be here."""

    device: Literal["cpu", "cuda"]
    device_bytes: int | None
    found: str
    """Where that is from."""


def planned_roles(run: BoundRun, target: Target, step: Step) -> list[list[PlannedRole]]:
    """By the devices that they share, the policy's first; none where nothing is trained."""
    if run.config.rollout.debug_rollout_only:
        return []
    return [[planned_role(run, role, target, step) for role in group] for group in sharing_devices(run.roles)]


def planned_role(run: BoundRun, role: BoundRole, target: Target, step: Step) -> PlannedRole:
    # A role beside the policy names a folder of its own, if it has one.
    named = "model.hf_checkpoint" if role.name == run.roles[0].name else f"roles.{role.name}.load"
    model_config = read_model_config(role.model_path, where=named)
    micro = micro_batches_of(run, role, step, model_config)
    setup = TrainerSetup(
        role=role.name,
        rank=0,
        world_size=role.num_ranks,
        local_rank=0,
        rendezvous="",
        device=target.device,
        model_path=role.model_path,
        head=role.head,
        frozen_models=role.frozen_models,
        optimizer=role.optimizer,
        chosen_optimizer=role.chosen_optimizer,
        total_steps=1,
        seed=run.config.seed,
        trust_remote_code=run.config.model.trust_remote_code,
        routing_replay=role.plan.routing_replay,
        true_on_policy=role.head == "lm" and run.algo.keys.true_on_policy_mode,
    )
    load = TrainerLoad(
        setup=setup, tokens=micro.tokens, scored_tokens=micro.scored_tokens, num_micro_batches=micro.count
    )
    planner = role.backend.driver if issubclass(role.backend.driver, TrainerPlanner) else None
    return PlannedRole(
        name=role.name,
        backend=role.backend.name,
        num_ranks=role.num_ranks,
        ranks_per_machine=min(role.ranks_per_node, role.num_ranks),
        micro_batches=micro,
        memory=None if planner is None else planner.memory(role.backend.config, load),
        savers=() if planner is None else planner.memory_savers(role.backend.config, load),
    )


def policy_engines(run: BoundRun, target: Target) -> PlannedEngines | None:
    """None where nothing is generated or evaluated."""
    if not (run.generates or run.evals):
        return None
    launcher = run.config.launcher
    return planned_engines(
        run,
        target,
        POLICY,
        run.engine,
        run.engine_folder,
        num_engines=launcher.num_engines,
        num_devices=launcher.rollout_num_gpus_per_engine,
        offload=launcher.offloads_rollout(target.device),
        weights_follow=run.weights_follow,
        refills=run.refills,
        transport=None if run.transport is None else run.transport.entry.name,
        adapter_rank=run.adapter_rank,
    )


def served_engines(run: BoundRun, target: Target) -> list[PlannedEngines]:
    return [
        planned_engines(
            run,
            target,
            row.name,
            row.engine,
            row.model_path,
            num_engines=row.num_engines,
            num_devices=row.num_devices,
            reward_model=row is run.reward_model,
        )
        for row in run.served
    ]


def planned_engines(
    run: BoundRun,
    target: Target,
    name: str,
    engine: BoundPlugin,
    model_path: Path,
    *,
    num_engines: int,
    num_devices: int,
    **own: Any,
) -> PlannedEngines:
    config = run.config
    of_policy = "model.hf_checkpoint" if config.model.rollout_load is None else "model.rollout_load"
    named = of_policy if name == POLICY else f"engines.{name}.load"
    model_config: Mapping[str, Any] = read_model_config(model_path, where=named)
    limit = context_length(model_config) or NO_LIMIT
    longest = min(limit, config.rollout.rollout_max_context_len or limit)
    setup = EngineSetup(
        index=0,
        model_path=model_path,
        device=target.device,
        seed=config.seed,
        max_context_len=longest,
        max_batch=config.rollout.concurrency,
        run_dir=Path(config.runs_dir) / config.name,
        trust_remote_code=config.model.trust_remote_code,
        num_devices=num_devices,
        num_nodes=config.launcher.nodes_of(num_devices),
        **own,
    )
    prompt = config.rollout.rollout_max_prompt_len
    if prompt is not None:
        longest = min(longest, prompt + config.rollout.rollout_max_response_len)
    load = EngineLoad(setup=setup, device_bytes=target.device_bytes)
    return PlannedEngines(
        name=name,
        engine=engine.name,
        num_engines=num_engines,
        devices_each=num_devices,
        nodes_each=setup.num_nodes,
        longest_request=longest,
        memory=engine.driver.memory(engine.config, load) if issubclass(engine.driver, EnginePlanner) else None,
    )


def push_memory(run: BoundRun, target: Target) -> TransportMemory | None:
    """None: the transport has no estimate. Empty where there is no transport."""
    if run.transport is None:
        return TransportMemory()
    # As trainers export them.
    element = 2 if target.device == "cuda" else 4
    folder, trusted = Path(run.config.model.hf_checkpoint), run.config.model.trust_remote_code
    num_bytes = element * num_parameters(folder, trust_remote_code=trusted)
    driver = run.transport.driver
    return driver.memory(run.transport.config, num_bytes) if issubclass(driver, TransportPlanner) else None
