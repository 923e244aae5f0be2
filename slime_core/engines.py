"""Engines: those of the policy, and those of other models, started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime_core.config.bound import BoundEngines, BoundRun, Part
from slime_core.contracts.backend import RoutingReplay
from slime_core.contracts.engine import Capability, EngineInfo, EngineSetup
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.errors import EngineError
from slime_core.launch.launcher import Launcher
from slime_core.materials import Materials
from slime_core.rollout.client import EngineClient
from slime_core.rollout.scorer import EngineScorer
from slime_core.rollout.seat import EngineHandle
from slime_core.rollout.served_engines import ServedEngines
from slime_core.workers.agreement import Agreement
from slime_core.workers.engine import EngineWorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngines:
    """By what they are for; None: the run has none of these."""

    policy: EngineClient | None
    teacher: EngineScorer | None
    reward: ServedEngines | None

    @property
    def served(self) -> tuple[ServedEngines, ...]:
        """Those of models that are not trained."""
        teacher = None if self.teacher is None else self.teacher.engines
        return tuple(engines for engines in (teacher, self.reward) if engines is not None)


async def start_engines(
    run: BoundRun,
    materials: Materials,
    launcher: Launcher,
    agreement: Agreement,
    device: str,
    run_dir: Path,
    middlewares: Mapping[str, RouterMiddleware],
    with_engine: bool,
    first: asyncio.Task[Any] | None,
) -> StartedEngines:
    """The policy's, behind `middlewares`, if it is to have any; and those of other models. `first`: what has to be there
    before."""
    if first is not None:
        await asyncio.wait({first})
    config = run.config
    limit = materials.model_config.get("max_position_embeddings") or 2**20
    on: Literal["cpu", "cuda"] = "cuda" if device == "cuda" else "cpu"

    def specs(
        engine: Part,
        model: Path,
        indices: range,
        num_devices: int,
        *,
        first_place: int = 0,
        devices_before: int = 0,
        offload: bool = False,
        routed_experts: bool = False,
        true_on_policy: bool = False,
        reward_model: bool = False,
    ) -> list[EngineWorkerSpec]:
        return [
            EngineWorkerSpec(
                agreement=agreement,
                engine=engine.spec(),
                setup=EngineSetup(
                    index=index,
                    place=first_place + index - indices.start,
                    model_path=model,
                    device=on,
                    seed=config.seed + index,
                    max_context_len=min(limit, config.rollout.rollout_max_context_len or limit),
                    max_batch=config.rollout.concurrency,
                    run_dir=run_dir,
                    trust_remote_code=config.model.trust_remote_code,
                    num_devices=num_devices,
                    first_device=devices_before + (index - indices.start) * num_devices,
                    num_nodes=config.launcher.nodes_of(num_devices),
                    offload=offload,
                    routed_experts=routed_experts,
                    true_on_policy=true_on_policy,
                    reward_model=reward_model,
                ),
            )
            for index in indices
        ]

    def of_row(row: BoundEngines, *, reward_model: bool = False) -> list[EngineWorkerSpec]:
        of_policy, before = config.launcher.num_engines, run.served[: run.served.index(row)]
        start = of_policy + sum(other.num_engines for other in before)
        devices = of_policy * config.launcher.rollout_num_gpus_per_engine
        return specs(
            row.engine,
            row.model_path,
            range(start, start + row.num_engines),
            row.num_devices,
            # Without options of its own its servers are listed behind the policy's.
            first_place=start if row.engine is run.engine else 0,
            devices_before=devices + sum(other.num_engines * other.num_devices for other in before),
            reward_model=reward_model,
        )

    def client_of(engines: Sequence[EngineHandle], through: Mapping[str, RouterMiddleware]) -> EngineClient:
        return EngineClient(
            engines,
            concurrency=config.rollout.concurrency,
            middlewares=list(through.values()),
            max_losses=config.rollout.max_retries,
            call_limit_s=config.rollout.engine_call_timeout,
        )

    async def served(row: BoundEngines, of_model: Sequence[EngineWorkerSpec]) -> ServedEngines:
        engines, infos = await launcher.start_engines(of_model)
        require_address(of_model, infos)
        return ServedEngines(client_of(engines, {}), infos, row.model_path, first_index=of_model[0].setup.index)

    client, teacher, reward = None, None, None
    if with_engine:
        of_policy = specs(
            run.engine,
            Path(config.model.hf_checkpoint),
            range(config.launcher.num_engines),
            config.launcher.rollout_num_gpus_per_engine,
            offload=config.launcher.offloads_rollout(device),
            routed_experts=run.routing_replay is RoutingReplay.ROLLOUT,
            true_on_policy=run.algo.keys.true_on_policy_mode,
        )
        engines, infos = await launcher.start_engines(of_policy)
        require_sleep(of_policy, infos)
        if config.data.multimodal_keys:
            require_images(of_policy, infos)
        require_experts(of_policy, infos)
        client = client_of(engines, middlewares)
    if (row := run.teacher) is not None:
        teacher = EngineScorer(row.name, await served(row, of_row(row)), max_losses=config.rollout.max_retries)
    if (row := run.reward_model) is not None:
        reward = await served(row, of_row(row, reward_model=True))
    return StartedEngines(policy=client, teacher=teacher, reward=reward)


def build_middlewares(run: BoundRun) -> dict[str, RouterMiddleware]:
    """By name, outermost first; a second one of a name has its number behind it."""
    built: dict[str, RouterMiddleware] = {}
    for part in run.middlewares:
        name = part.entry.name
        built[name if name not in built else f"{name}-{len(built)}"] = part.build()
    return built


def require_images(specs: Sequence[EngineWorkerSpec], infos: Sequence[EngineInfo]) -> None:
    """EngineError for an engine that could not be given a prompt of this run."""
    for spec, info in zip(specs, infos, strict=True):
        if Capability.IMAGES not in info.capabilities:
            raise EngineError(
                f"engine {spec.setup.index} takes no images with the model {spec.setup.model_path} (data.multimodal_keys). Use "
                "another engine, or another model."
            )


def require_sleep(specs: Sequence[EngineWorkerSpec], infos: Sequence[EngineInfo]) -> None:
    """EngineError for an engine that should give memory back and cannot."""
    for spec, info in zip(specs, infos, strict=True):
        if spec.setup.offload and Capability.SLEEP not in info.capabilities:
            raise EngineError(
                f"engine {spec.setup.index} cannot give its memory back while the trainer works (launcher.colocate, "
                "launcher.offload_rollout). Start it so that it can, or say --no-offload-rollout if there is room for both."
            )


def require_experts(specs: Sequence[EngineWorkerSpec], infos: Sequence[EngineInfo]) -> None:
    """EngineError for an engine that should tell expert ids and cannot."""
    for spec, info in zip(specs, infos, strict=True):
        if spec.setup.routed_experts and Capability.ROUTED_EXPERTS not in info.capabilities:
            raise EngineError(
                f"engine {spec.setup.index} does not tell which experts it chose (train.use_rollout_routing_replay). Say "
                "--use-routing-replay to replay the trainer's own choice, or use an engine that tells."
            )


def require_address(specs: Sequence[EngineWorkerSpec], infos: Sequence[EngineInfo]) -> None:
    """EngineError for an engine of a reward model that nobody could ask."""
    for spec, info in zip(specs, infos, strict=True):
        if spec.setup.reward_model and info.address is None:
            raise EngineError(
                f"engine {spec.setup.index} serves no requests over HTTP, and rewards ask the model of engines.reward so. Use "
                "another engine (--engines.reward.engine)."
            )
