"""EngineSpecs: the specs that the engines of a run are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.bound import BoundEngines, BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.contracts.setup import EngineSetup, RoutingReplay
from slime_core.data.model_folder import NO_LIMIT, context_length
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine_worker import EngineWorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpecs:
    """Engines are numbered, and given devices, in the order: the policy's, then those of each row of the engines table."""

    run: BoundRun
    agreement: Agreement
    device: str
    run_dir: Path
    model_config: Mapping[str, Any]
    """config.json of the policy."""

    def of_policy(self) -> list[EngineWorkerSpec]:
        launcher = self.run.config.launcher
        return [
            self._spec(
                self.run.engine,
                index=index,
                place=index,
                model_path=self.run.engine_folder,
                num_devices=launcher.rollout_num_gpus_per_engine,
                first_device=index * launcher.rollout_num_gpus_per_engine,
                offload=launcher.offloads_rollout(self.device),
                weights_follow=self.run.weights_follow,
                refills=self.run.refills,
                transport=None if self.run.transport is None else self.run.transport.entry.name,
                adapter_rank=self.run.adapter_rank,
                routed_experts=self.run.routing_replay is RoutingReplay.ROLLOUT,
                true_on_policy=self.run.algo.keys.true_on_policy_mode,
                records=self.run.records_schedule,
            )
            for index in range(launcher.num_engines)
        ]

    def of_row(self, row: BoundEngines) -> list[EngineWorkerSpec]:
        launcher, before = self.run.config.launcher, self.run.served[: self.run.served.index(row)]
        first = launcher.num_engines + sum(other.num_engines for other in before)
        devices = launcher.num_engines * launcher.rollout_num_gpus_per_engine
        devices += sum(other.num_engines * other.num_devices for other in before)
        return [
            self._spec(
                row.engine,
                index=first + number,
                # Without options of its own its servers are listed behind the policy's.
                place=number + (first if row.engine is self.run.engine else 0),
                model_path=row.model_path,
                num_devices=row.num_devices,
                first_device=devices + number * row.num_devices,
                reward_model=row is self.run.reward_model,
            )
            for number in range(row.num_engines)
        ]

    def _spec(self, engine: BoundPlugin, *, index: int, num_devices: int, **own: Any) -> EngineWorkerSpec:
        config = self.run.config
        limit = context_length(self.model_config) or NO_LIMIT
        setup = EngineSetup(
            index=index,
            device="cuda" if self.device == "cuda" else "cpu",
            seed=config.seed + index,
            max_context_len=min(limit, config.rollout.rollout_max_context_len or limit),
            max_batch=config.rollout.concurrency,
            run_dir=self.run_dir,
            trust_remote_code=config.model.trust_remote_code,
            num_devices=num_devices,
            num_nodes=config.launcher.nodes_of(num_devices),
            **own,
        )
        return EngineWorkerSpec(agreement=self.agreement, engine=engine.spec(), setup=setup)
