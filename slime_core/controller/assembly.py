"""Starts trainers, engines and rewards side by side, and makes a Session of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from slime_core.config.bound import BoundRun
from slime_core.config.part import BoundPlugin
from slime_core.contracts.generator import Generator
from slime_core.contracts.hookspecs import BatchReady, EventLoopBlocked, Run, SampleFailed
from slime_core.contracts.middleware import RouterMiddleware
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import EvalTask, Evaluator
from slime_core.controller.group_settings import eval_settings, training_settings
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.controller.null_learner import NullLearner
from slime_core.controller.run_folder import RunFolder
from slime_core.controller.run_inputs import NoSource, RunInputs
from slime_core.controller.session import Session
from slime_core.data.buffer import DataBuffer, take_prompts
from slime_core.data.train_data import train_data_file, write_train_data
from slime_core.errors import RewardError, SlimeError
from slime_core.registry.boundary import foreign
from slime_core.registry.hooks import Hooks
from slime_core.rollout.groups import GroupRunner, GroupSettings, SampleFailure
from slime_core.rollout.rewards import OwnLimit, RewardPool
from slime_core.rollout.served_engines import ServedEngines
from slime_core.rollout.trace import RolloutTrace
from slime_core.types.batch import Batch, TokenColumns
from slime_core.workers.agreement import Agreement
from slime_core.workers.colocation import ColocationManager
from slime_core.workers.devices import Devices
from slime_core.workers.engine_specs import EngineSpecs
from slime_core.workers.engines import StartedEngines, build_middlewares, start_engines
from slime_core.workers.launcher import Launcher
from slime_core.workers.role_specs import RoleSpecs
from slime_core.workers.roles import start_roles
from slime_core.workers.rollout_workers import RolloutWorkers, rollout_workers_of
from slime_core.workers.stopwatch import StartTimes
from slime_core.workers.train_group import TrainGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """The folder and device of a run, its `Run` for events, and the state that it starts with."""

    folder: RunFolder
    event: Run
    device: str
    hooks: Hooks
    store: CheckpointStore
    state: RunState
    times: StartTimes

    def loop_blocked(self, seconds: float, where: str) -> None:
        self.hooks.emit(EventLoopBlocked(run=self.event, seconds=seconds, where=where))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The workers that were started."""

    roles: Mapping[str, TrainGroup]
    """Empty in a run that only generates."""
    engines: StartedEngines
    middlewares: Mapping[str, RouterMiddleware]
    generators: Mapping[str, Generator]
    """Generators by their spec."""
    rewards: RewardPool
    rollout: RolloutWorkers | None
    """None: groups are run in this process."""


async def assemble_session(
    run: BoundRun, inputs: RunInputs, launcher: Launcher, place: RunPlace, stack: contextlib.AsyncExitStack
) -> Session:
    """Starts what the run needs; `stack` ends it."""
    reports = Reports(run, place)
    workers = await start_workers(run, inputs, launcher, place, reports, stack)
    trace = RolloutTrace(place.folder.traces if run.config.debug.trace_samples else None)
    stack.callback(trace.close)
    client = workers.engines.policy
    # Generation needs the policy versions that may be trained, which the session knows.
    session: Session

    def runner(settings: GroupSettings, generate: BoundPlugin) -> GroupRunner:
        assert client is not None
        own = GroupRunner(
            settings,
            generator=workers.generators[generate.spec().to_json()],
            client=client,
            tokenizer=inputs.tokenizer,
            rewards=workers.rewards,
            on_failure=partial(reports.sample_failed, evaluation=settings.evaluation),
            on_trace=trace.add,
            versions=lambda: session.trained_versions,
        )
        return own if workers.rollout is None else workers.rollout.runner(own, generate.spec())

    roles = workers.roles
    session = Session(
        run=run,
        event=place.event,
        folder=place.folder,
        num_rollout=inputs.num_rollout,
        tokenizer=inputs.tokenizer,
        buffer=DataBuffer(inputs.source or NoSource(), run.buffer_filter.build()),
        collector=run.collector.build(),
        runner=None if client is None else runner(training_settings(run), run.generate),
        filters=[part.build() for part in run.filters],
        client=client,
        served_engines=workers.engines.served,
        middlewares=workers.middlewares,
        roles=roles,
        learner=learner_of(run, workers, reports, before_steps=lambda: session.optimizer_idle.clear()),
        colocation=colocation_of(run, workers, place.device),
        transport=None if client is None or run.transport is None or not roles else run.transport.build(),
        evaluator=Evaluator(eval_tasks(run, inputs, runner)),
        store=place.store,
        trackers=(),
        hooks=place.hooks,
        state=place.state,
        kept_ahead=[],
        saved_rollout_id=place.state.rollout_id,
        faults=reports.failures,
        trace=trace,
        start_times=place.times,
    )
    return session


@dataclass(frozen=True, slots=True)
class Reports:
    """What observers receive and files record while groups are generated and trained."""

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
    run: BoundRun,
    inputs: RunInputs,
    launcher: Launcher,
    place: RunPlace,
    reports: Reports,
    stack: contextlib.AsyncExitStack,
) -> Workers:
    """Trainers, engines, generators and rewards, at the same time. The first that fails stops the others, and is raised."""
    converter = () if inputs.converter is None else (inputs.converter,)
    agreement = Agreement.of((*run.parts, *converter), run.registry.plugin_files)
    with_engine = bool(run.generates or run.evals)
    rewards = start_rewards(run, stack)
    middlewares = build_middlewares(run)
    specs = EngineSpecs(
        run=run,
        agreement=agreement,
        device=place.device,
        run_dir=place.folder.path,
        model_config=inputs.model_config,
    )
    generators = build_generators(run, stack) if with_engine else {}
    rollout = rollout_workers_of(run, agreement, reports.failures, place.loop_blocked)
    if rollout is not None:
        stack.push_async_callback(rollout.stop)
    try:
        async with asyncio.TaskGroup() as starting:
            trainers = starting.create_task(start_trained(run, inputs, launcher, agreement, place))
            # An engine that shares devices uses their free memory: the trainers are offloaded by then.
            first = trainers if run.config.launcher.colocate else None
            engines = starting.create_task(start_engines(specs, launcher, middlewares, with_engine, first, place.times))
            if rollout is not None:
                starting.create_task(rollout.start(partial(reward_engines, engines)))
            for generator in generators.values() if rollout is None else ():
                starting.create_task(call_generator(generator, "open"))
            for part in run.reward_parts if rollout is None else ():
                starting.create_task(warm_reward(rewards, part, engines))
    except ExceptionGroup as group:
        # The first failure stops the others; it is the one to raise.
        raise next(
            (error for error in group.exceptions if isinstance(error, SlimeError)), group.exceptions[0]
        ) from None
    return Workers(
        roles=trainers.result(),
        engines=engines.result(),
        middlewares=middlewares,
        generators=generators,
        rewards=rewards,
        rollout=rollout,
    )


def learner_of(
    run: BoundRun, workers: Workers, reports: Reports, before_steps: Callable[[], None]
) -> Learner | NullLearner:
    if not workers.roles:
        return NullLearner(run.config.debug)
    return Learner(
        workers.roles,
        LearnerPlan.of(run),
        on_batch=reports.batch_ready,
        before_steps=before_steps,
        teacher=workers.engines.teacher,
    )


def colocation_of(run: BoundRun, workers: Workers, device: str) -> ColocationManager:
    launcher, roles = run.config.launcher, workers.roles
    return ColocationManager(
        next(iter(roles.values())).devices if roles else Devices(),
        workers.engines.policy,
        shared=launcher.colocate and bool(roles),
        offload_rollout=launcher.offloads_rollout(device),
    )


async def start_trained(
    run: BoundRun, inputs: RunInputs, launcher: Launcher, agreement: Agreement, place: RunPlace
) -> dict[str, TrainGroup]:
    """The trained roles; none in a run that only generates."""
    if run.config.rollout.debug_rollout_only:
        return {}
    specs = RoleSpecs(
        run=run,
        agreement=agreement,
        device="cuda" if place.device == "cuda" else "cpu",
        run_dir=place.folder.path,
        num_rollout=inputs.num_rollout,
        converter=inputs.converter,
    )
    return await start_roles(specs, launcher, inputs.role_configs, place.times)


def build_generators(run: BoundRun, stack: contextlib.AsyncExitStack) -> dict[str, Generator]:
    """The generators by their spec: equal specs share one generator. They are closed with the run."""
    built: dict[str, Generator] = {}
    for part in (run.generate, *(settings.generate for settings in run.evals if settings.generate is not None)):
        key = part.spec().to_json()
        if key not in built:
            built[key] = part.build()
            stack.push_async_callback(call_generator, built[key], "close")
    return built


async def call_generator(generator: Generator, method: str) -> None:
    with foreign(generator, method):
        await getattr(generator, method)()


async def reward_engines(starting: asyncio.Task[StartedEngines]) -> ServedEngines | None:
    return (await starting).reward


async def warm_reward(pool: RewardPool, part: BoundPlugin, starting: asyncio.Task[StartedEngines]) -> None:
    """Builds the reward in the reward workers; if it queries engines, after they have started."""
    asks = part.driver.needs_reward_model(part.config)
    if asks:
        pool.engines = (await starting).reward
    own = OwnLimit(seconds=partial(part.driver.timeout_s, part.config), follows=part.driver.timeout_follows)
    await pool.warm(part.spec(), own=own, needs_reward_model=asks)


def start_rewards(run: BoundRun, stack: contextlib.AsyncExitStack) -> RewardPool:
    rollout = run.config.rollout
    pool = RewardPool(run.registry.plugin_files, workers=rollout.reward_workers, timeout_s=rollout.reward_timeout)
    stack.callback(pool.close)
    return pool


def eval_tasks(
    run: BoundRun, inputs: RunInputs, runner: Callable[[GroupSettings, BoundPlugin], GroupRunner]
) -> Sequence[EvalTask]:
    tasks = []
    for settings in run.evals:
        source = inputs.eval_sources[settings.name]
        prompts = take_prompts(source, source.num_rows or 0)
        made = runner(eval_settings(run, settings), settings.generate or run.generate)
        tasks.append(EvalTask(settings=settings, prompts=prompts, runner=made))
    return tasks
