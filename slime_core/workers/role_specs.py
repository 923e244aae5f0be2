"""RoleSpecs: the specs that the ranks of a run's trained roles are started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.config.roles import BoundRole
from slime_core.contracts.setup import TrainerSetup
from slime_core.contracts.transport import SenderSetup
from slime_core.errors import ConfigError
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_format import EngineFormat
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.profile import ProfilePlan
from slime_core.workers.train_worker import TrainWorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpecs:
    """Makes the specs of one run, for one kind of device."""

    run: BoundRun
    agreement: Agreement
    device: Literal["cpu", "cuda"]
    run_dir: Path
    """Folder of profiles, and of files that a weight transport writes."""
    num_rollout: int
    converter: BoundPlugin | None = None
    """Converts trained weights to the format of the policy's engines; None: they have the same format."""

    def of_role(self, role: BoundRole) -> list[TrainWorkerSpec]:
        """A spec for each rank. ConfigError for what the device cannot do."""
        run, config = self.run, self.run.config
        # The engines serve the policy.
        transport = run.transport if role.name == run.roles[0].name else None
        engine_format = None
        if transport is not None and self.converter is not None:
            engine_format = EngineFormat(converter=self.converter.spec(), folder=run.engine_folder)
        profile = self._profile()
        return [
            TrainWorkerSpec(
                agreement=self.agreement,
                backend=role.backend.spec(),
                optimizer=role.optimizer_part.spec(),
                objective=ObjectiveSpec.of(role),
                temperature=config.rollout.rollout_temperature if role.loss.driver.uses_advantages else 1.0,
                profile=profile,
                transport=None if transport is None else transport.spec(),
                engine_format=engine_format,
                media=run.media[0].spec() if run.media else None,
                setup=TrainerSetup(
                    role=role.name,
                    rank=rank,
                    world_size=role.num_ranks,
                    local_rank=rank % role.ranks_per_node,
                    rendezvous="",
                    device=self.device,
                    model_path=role.model_path,
                    head=role.head,
                    frozen_models=role.frozen_models,
                    optimizer=role.optimizer,
                    total_steps=max(1, (self.num_rollout - role.plan.idle_steps) * run.steps_per_rollout),
                    seed=config.seed,
                    trust_remote_code=config.model.trust_remote_code,
                    routing_replay=role.plan.routing_replay,
                    true_on_policy=role.head == "lm" and run.algo.keys.true_on_policy_mode,
                ),
                sender=SenderSetup(
                    rank=rank,
                    world_size=role.num_ranks,
                    device=self.device,
                    model_path=role.model_path,
                    run_dir=self.run_dir,
                    colocated=config.launcher.colocate,
                ),
            )
            for rank in range(role.num_ranks)
        ]

    def _profile(self) -> ProfilePlan:
        debug = self.run.config.debug
        if debug.record_memory_history and self.device == "cpu":
            raise ConfigError("debug.record_memory_history: there is no CUDA device, and only its memory is recorded.")
        return ProfilePlan(
            folder=self.run_dir / "profile",
            targets=debug.profile_target if debug.use_pytorch_profiler else (),
            first=debug.profile_step_start,
            end=debug.profile_step_end,
            memory=debug.record_memory_history,
            memory_steps=debug.memory_snapshot_num_steps,
        )
