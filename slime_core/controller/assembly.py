"""Assembly: trainers, engines and rewards are started side by side, and put together as a Session."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from slime_core.config.bound import BoundRun
from slime_core.config.part import Part
from slime_core.contracts.generator import Generator
from slime_core.contracts.hookspecs import BatchReady, Run, SampleFailed
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import EvalTask, Evaluator
from slime_core.controller.group_settings import eval_settings, training_settings
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.controller.null_learner import RolloutOnly
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.run_inputs import Materials, NoSource
from slime_core.controller.session import Session
from slime_core.data.buffer import DataBuffer
from slime_core.data.train_data import train_data_file, write_train_data
from slime_core.errors import RewardError, SlimeError
from slime_core.registry.hooks import Hooks
from slime_core.rollout.groups import GroupRunner, GroupSettings, SampleFailure
from slime_core.rollout.rewards import OwnLimit, RewardPool
from slime_core.rollout.trace import RolloutTrace
from slime_core.types.batch import Batch, TokenColumns
from slime_core.workers.agreement import Agreement
from slime_core.workers.colocation import Residency
from slime_core.workers.devices import Devices
from slime_core.workers.engine_specs import EngineSpecs
from slime_core.workers.engines import StartedEngines, build_middlewares, start_engines
from slime_core.workers.launcher import Launcher
from slime_core.workers.role_specs import RoleSpecs
from slime_core.workers.roles import start_roles
from slime_core.workers.train_group import Trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a run is, what it is told to observers as, and the state that it starts with."""

    folder: RunFolder
    event: Run
    device: str
    hooks: Hooks
    store: CheckpointStore
    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What was started."""

    roles: Mapping[str, Trainers]
    """Empty in a run that only generates."""
    engines: StartedEngines
    middlewares: Mapping[str, RouterMiddleware]
    generators: Mapping[str, Generator]
    """By their spec."""
    rewards: RewardPool


async def assemble_session(
    run: BoundRun, materials: Materials, launcher: Launcher, place: RunPlace, stack: contextlib.AsyncExitStack
) -> Session:
    """Starts what the run needs; `stack` ends it."""
    workers = await start_workers(run, materials, launcher, place, stack)
    trace = RolloutTrace(place.folder.traces if run.config.debug.trace_samples else None)
    stack.callback(trace.close)
    reports = Reports(run, place)
    client = workers.engines.policy
    # Who generates asks for the versions that may be trained by then, which the session knows.
    session: Session

    def runner(settings: GroupSettings, generate: Part) -> GroupRunner:
        assert client is not None
        return GroupRunner(
            settings,
            generator=workers.generators[generate.spec().to_json()],
            client=client,
            tokenizer=materials.tokenizer,
            rewards=workers.rewards,
            on_failure=partial(reports.sample_failed, evaluation=settings.evaluation),
            on_trace=trace.add,
            versions=lambda: session.trained_versions,
        )

    roles = workers.roles
    session = Session(
        run=run,
        event=place.event,
        folder=place.folder,
        num_rollout=materials.num_rollout,
        tokenizer=materials.tokenizer,
        buffer=DataBuffer(materials.source or NoSource(), run.buffer_filter.build()),
        collector=run.collector.build(),
        runner=None if client is None else runner(training_settings(run), run.generate),
        filters=[part.build() for part in run.filters],
        client=client,
        served_engines=workers.engines.served,
        middlewares=workers.middlewares,
        roles=roles,
        learner=learner_of(run, workers, reports, before_steps=lambda: session.between_steps.clear()),
        residency=residency_of(run, workers, place.device),
        transport=None if client is None or run.transport is None or not roles else run.transport.build(),
        evaluator=Evaluator(eval_tasks(run, materials, runner)),
        store=place.store,
        trackers=(),
        hooks=place.hooks,
        state=place.state,
        kept_ahead=[],
        saved_rollout_id=place.state.rollout_id,
        faults=reports.failures,
        trace=trace,
    )
    return session


@dataclass(frozen=True, slots=True)
class Reports:
    """What observers and files are told while groups are made and trained."""

    run: BoundRun
    place: RunPlace
    failures: Counter[str] = field(default_factory=Counter)
    """Metrics of rewards that failed, for the next step's record."""

    def sample_failed(self, failure: SampleFailure, *, evaluation: bool) -> None:
        if isinstance(failure.error, RewardError) and not evaluation:
            self.failures[f"rollout/reward_outcome/{failure.error.outcome}"] += 1
        self.place.hooks.emit(
            SampleFailed(
                run=self.place.event,
                prompt=failure.prompt,
                sample_index=failure.index,
                attempt=failure.attempt,
                will_retry=failure.will_retry,
                error=failure.error,
            )
        )

    def batch_ready(self, rollout_id: int, version: int, batch: Batch, columns: TokenColumns) -> None:
        if self.run.config.debug.save_debug_train_data:
            write_train_data(train_data_file(self.place.folder.train_data, rollout_id), batch, columns)
        self.place.hooks.emit(
            BatchReady(run=self.place.event, rollout_id=rollout_id, version=version, batch=batch, columns=columns)
        )


async def start_workers(
    run: BoundRun, materials: Materials, launcher: Launcher, place: RunPlace, stack: contextlib.AsyncExitStack
) -> Workers:
    """Trainers, engines, generators and rewards, at the same time. The first that fails stops the others, and is raised."""
    converter = () if materials.converter is None else (materials.converter,)
    agreement = Agreement.of((*run.parts, *converter), run.registry.plugin_files)
    with_engine = bool(run.generates or run.evals)
    rewards = start_rewards(run, stack)
    middlewares = build_middlewares(run)
    specs = EngineSpecs(
        run=run,
        agreement=agreement,
        device=place.device,
        run_dir=place.folder.path,
        model_config=materials.model_config,
    )
    generators = build_generators(run, stack) if with_engine else {}
    try:
        async with asyncio.TaskGroup() as starting:
            trainers = starting.create_task(
                start_trained(run, materials, launcher, agreement, place.device, place.folder)
            )
            # An engine that shares devices takes what is left of them: the trainers are asleep by then.
            first = trainers if run.config.launcher.colocate else None
            engines = starting.create_task(start_engines(specs, launcher, middlewares, with_engine, first))
            for generator in generators.values():
                starting.create_task(generator.open())
            for part in run.reward_parts:
                starting.create_task(warm_reward(rewards, part, engines))
    except ExceptionGroup as group:
        # One of them stops the others; the user wants to know of that one.
        raise next(
            (error for error in group.exceptions if isinstance(error, SlimeError)), group.exceptions[0]
        ) from None
    return Workers(
        roles=trainers.result(),
        engines=engines.result(),
        middlewares=middlewares,
        generators=generators,
        rewards=rewards,
    )


def learner_of(
    run: BoundRun, workers: Workers, reports: Reports, before_steps: Callable[[], None]
) -> Learner | RolloutOnly:
    if not workers.roles:
        return RolloutOnly(run.config.debug)
    return Learner(
        workers.roles,
        LearnerPlan.of(run),
        on_batch=reports.batch_ready,
        before_steps=before_steps,
        teacher=workers.engines.teacher,
    )


def residency_of(run: BoundRun, workers: Workers, device: str) -> Residency:
    launcher, roles = run.config.launcher, workers.roles
    return Residency(
        next(iter(roles.values())).devices if roles else Devices(),
        workers.engines.policy,
        shared=launcher.colocate and bool(roles),
        offload_rollout=launcher.offloads_rollout(device),
    )


async def start_trained(
    run: BoundRun, materials: Materials, launcher: Launcher, agreement: Agreement, device: str, folder: RunFolder
) -> dict[str, Trainers]:
    """The trained roles; none in a run that only generates."""
    if run.config.rollout.debug_rollout_only:
        return {}
    specs = RoleSpecs(
        run=run,
        agreement=agreement,
        device="cuda" if device == "cuda" else "cpu",
        run_dir=folder.path,
        num_rollout=materials.num_rollout,
        converter=materials.converter,
    )
    return await start_roles(specs, launcher, materials.role_configs)


def build_generators(run: BoundRun, stack: contextlib.AsyncExitStack) -> dict[str, Generator]:
    """By their options: equal ones share one, so that what it opens is opened once. They are closed with the run."""
    built: dict[str, Generator] = {}
    for part in (run.generate, *(settings.generate for settings in run.evals if settings.generate is not None)):
        key = part.spec().to_json()
        if key not in built:
            built[key] = part.build()
            stack.push_async_callback(built[key].close)
    return built


async def warm_reward(pool: RewardPool, part: Part, starting: asyncio.Task[StartedEngines]) -> None:
    """Builds it in the workers; one that asks engines, when they are there."""
    asks = part.driver.asks_engines(part.config)
    if asks:
        pool.engines = (await starting).reward
    own = OwnLimit(seconds=partial(part.driver.timeout_s, part.config), follows=part.driver.timeout_follows)
    await pool.warm(part.spec(), own=own, asks_engines=asks)


def start_rewards(run: BoundRun, stack: contextlib.AsyncExitStack) -> RewardPool:
    rollout = run.config.rollout
    pool = RewardPool(run.registry.plugin_files, workers=rollout.reward_workers, timeout_s=rollout.reward_timeout)
    stack.callback(pool.close)
    return pool


def eval_tasks(
    run: BoundRun, materials: Materials, runner: Callable[[GroupSettings, Part], GroupRunner]
) -> Sequence[EvalTask]:
    tasks = []
    for settings in run.evals:
        source = materials.eval_sources[settings.name]
        prompts = source.take(source.num_rows or 0)
        made = runner(eval_settings(run, settings), settings.generate or run.generate)
        tasks.append(EvalTask(settings=settings, prompts=prompts, runner=made))
    return tasks
