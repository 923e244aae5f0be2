"""Engines: those of the policy, and those of other models, started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.config.bound import BoundEngines, BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.contracts.engine import Capability, EngineInfo
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError
from slime_core.rollout.client import EngineClient
from slime_core.rollout.engine_slot import EngineHandle
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.teacher_client import TeacherClient
from slime_core.workers.engine_specs import EngineSpecs
from slime_core.workers.engine_worker import EngineWorkerSpec
from slime_core.workers.launcher import Launcher
from slime_core.workers.stopwatch import StartTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngines:
    """Engines by purpose; None: the run has none of these."""

    policy: EngineClient | None
    teacher: TeacherClient | None
    reward: ServedEngines | None

    @property
    def served(self) -> tuple[ServedEngines, ...]:
        """Engines of models that are not trained."""
        teacher = None if self.teacher is None else self.teacher.engines
        return tuple(engines for engines in (teacher, self.reward) if engines is not None)


async def start_engines(
    specs: EngineSpecs,
    launcher: Launcher,
    middlewares: Mapping[str, RouterMiddleware],
    with_engine: bool,
    first: asyncio.Task[Any] | None,
    times: StartTimes,
) -> StartedEngines:
    """Starts the policy's engines behind `middlewares`, if it needs any, and those of other models. `first` ends before."""
    run, of_policy = specs.run, specs.of_policy() if with_engine else []
    client, teacher, reward = None, None, None
    began = time.perf_counter()
    if first is not None:
        await launcher.prepare_engines(of_policy)
        await asyncio.wait({first})
    if with_engine:
        engines, infos = await launcher.start_engines(of_policy)
        times.add("engine", began, infos[0].start_seconds)
        require(of_policy, infos, media=run.media)
        client = client_of(run, engines, middlewares)
    if run.teacher is not None:
        served = await start_served(specs, run.teacher, launcher)
        teacher = TeacherClient(run.teacher.name, served, max_losses=run.config.rollout.max_retries)
    if run.reward_model is not None:
        reward = await start_served(specs, run.reward_model, launcher)
    return StartedEngines(policy=client, teacher=teacher, reward=reward)


async def start_served(specs: EngineSpecs, row: BoundEngines, launcher: Launcher) -> ServedEngines:
    of_row = specs.of_row(row)
    engines, infos = await launcher.start_engines(of_row)
    require(of_row, infos)
    return ServedEngines(
        client_of(specs.run, engines, {}),
        infos,
        row.model_path,
        engine=row.engine.entry.name,
        first_index=of_row[0].setup.index,
    )


def client_of(
    run: BoundRun, engines: Sequence[EngineHandle], middlewares: Mapping[str, RouterMiddleware]
) -> EngineClient:
    rollout = run.config.rollout
    return EngineClient(
        engines,
        concurrency=rollout.concurrency,
        middlewares=list(middlewares.values()),
        max_losses=rollout.max_retries,
        call_limit_s=rollout.engine_call_timeout,
        middleware_limit_s=run.config.router.middleware_timeout,
    )


def build_middlewares(run: BoundRun) -> dict[str, RouterMiddleware]:
    """The middlewares by name, outermost first; a second one of the same name gets a number behind it."""
    built: dict[str, RouterMiddleware] = {}
    for part in run.middlewares:
        name = part.entry.name
        built[name if name not in built else f"{name}-{len(built)}"] = part.build()
    return built


def require(specs: Sequence[EngineWorkerSpec], infos: Sequence[EngineInfo], media: Sequence[BoundPlugin] = ()) -> None:
    """EngineError for an engine that cannot do what the run requires."""
    for spec, info in zip(specs, infos, strict=True):
        if lacks := next(lacks_of(spec.setup, info, media), None):
            raise EngineError(f"engine {spec.setup.index} {lacks}")


def lacks_of(setup: EngineSetup, info: EngineInfo, media: Sequence[BoundPlugin]) -> Iterator[str]:
    if setup.offload and Capability.SLEEP not in info.capabilities:
        yield (
            "cannot give its memory back while the trainer works (launcher.colocate, launcher.offload_rollout). Start it so "
            "that it can, or pass --no-offload-rollout if there is room for both."
        )
    missing = [part.driver.needs for part in media if part.driver.needs not in info.capabilities]
    if missing:
        yield (
            f"takes no {' and no '.join(missing)} with the model {setup.model_path} (data.multimodal_keys). Use another "
            "engine, or another model."
        )
    if setup.routed_experts and Capability.ROUTED_EXPERTS not in info.capabilities:
        yield (
            "does not report which experts it chose (train.use_rollout_routing_replay). Pass --use-routing-replay to replay "
            "the trainer's own choice, or use an engine that reports it."
        )
    if setup.reward_model and info.address is None:
        yield (
            "serves no requests over HTTP, and rewards ask the model of engines.reward so. Use another engine "
            "(--engines.reward.engine)."
        )
