"""Startup: a bound run to a Session, and its end. The order: data, folder, trainers and engines, state, observers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import tomlkit

from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.storage import storage_errors
from slime_core.config.bound import BoundRun
from slime_core.config.part import Part
from slime_core.contracts.generator import Generator
from slime_core.contracts.hookspecs import BatchReady, LoopHeld, Run, RunEnd, RunStart, SampleFailed
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.evaluate import EvalTask, Evaluator
from slime_core.controller.event_log import EventLog
from slime_core.controller.event_loop_watchdog import LoopWatch
from slime_core.controller.gc_control import settled_heap
from slime_core.controller.group_settings import eval_settings, training_settings
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.controller.manifest import build_manifest, replay_identity
from slime_core.controller.null_learner import RolloutOnly
from slime_core.controller.run_folder import RunFolder, choose_folder, lock_folder
from slime_core.controller.run_inputs import Materials, NoSource
from slime_core.controller.saving import read_ahead
from slime_core.controller.schedule import RecordedSchedule, ScheduleFile, read_schedule
from slime_core.controller.session import Session
from slime_core.controller.supervision import supervisors
from slime_core.data.buffer import DataBuffer
from slime_core.data.train_data import train_data_file, write_train_data
from slime_core.errors import CheckpointError, ConfigError, RewardError, SlimeError
from slime_core.registry.hooks import Hooks
from slime_core.rollout.groups import GroupRunner, GroupSettings, SampleFailure
from slime_core.rollout.pool_events import PoolRecord, RequestScript
from slime_core.rollout.rewards import OwnLimit, RewardPool
from slime_core.rollout.trace import RolloutTrace
from slime_core.types.batch import Batch, TokenColumns
from slime_core.workers.agreement import Agreement
from slime_core.workers.choose import build_launcher, choose_device
from slime_core.workers.colocation import Residency
from slime_core.workers.devices import Devices
from slime_core.workers.engine_specs import EngineSpecs
from slime_core.workers.engines import StartedEngines, build_middlewares, start_engines
from slime_core.workers.launcher import Launcher
from slime_core.workers.role_specs import RoleSpecs
from slime_core.workers.roles import start_roles
from slime_core.workers.train_group import Trainers

LOOP_HELD_S: Final = 30.0
"""So long a run stands still before it is told who holds its loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How `slime run` was asked to start."""

    fresh: bool = False
    resume: Path | None = None
    ckpt_step: int | None = None
    replay: Path | None = None
    """The schedule of another run, to be repeated."""


@contextlib.asynccontextmanager
async def start(
    run: BoundRun, materials: Materials, options: StartOptions, observers: Mapping[str, object]
) -> AsyncIterator[Session]:
    """The running session; on the way out everything is stopped and observers are told, whatever happened."""
    fingerprint = "" if materials.source is None else materials.source.fingerprint()
    manifest = build_manifest(run, data_fingerprint=fingerprint)
    config = run.config
    device = choose_device(config.launcher.device)
    # First of all: --fresh removes a run.
    recorded = None if options.replay is None else read_schedule(options.replay, replay_identity(manifest))
    folder = choose_folder(Path(config.runs_dir), manifest, config.name, fresh=options.fresh, resume=options.resume)
    if options.ckpt_step is not None and folder.read_manifest() is None:
        raise CheckpointError(
            f"--ckpt-step {options.ckpt_step}: no unfinished run with this config, these plugins and this data is in "
            f"{config.runs_dir}. Say which folder to go on in: --resume {config.runs_dir}/NAME."
        )
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(storage_errors(folder.path))
        stack.enter_context(lock_folder(folder))
        attempt = count_attempt(folder)
        store = CheckpointStore(folder.checkpoints, keep=config.checkpoint.keep_checkpoints)
        found = store.load(options.ckpt_step)
        state = RunState() if found is None else found[0]
        if options.ckpt_step is not None:
            store.set_aside_after(options.ckpt_step)
        write_text(folder.manifest, manifest.to_json())
        write_text(folder.config, tomlkit.dumps(drop_none(manifest.config)))
        event = Run(name=config.name, run_dir=folder.path, config=manifest.config, attempt=attempt)
        hooks = Hooks.load(run.registry, own={"slime/events": EventLog(folder.events), **observers})
        trackers = [part.build() for part in run.trackers]
        info = RunInfo(
            name=config.name,
            run_dir=folder.path,
            config=manifest.config,
            attempt=attempt,
            resumed_at=None if attempt == 1 else state.rollout_id,
        )
        for tracker in trackers:
            tracker.start(info)
            stack.push(partial(finish, tracker))
        launcher = build_launcher(config.launcher)
        stack.push_async_callback(launcher.stop)
        session = await assemble_session(run, materials, launcher, device, folder, event, hooks, stack, store, state)
        session.trackers = trackers
        if found is not None:
            await restore(session, found[1])
        if run.records_schedule:
            session.schedule = ScheduleFile(
                folder.schedule,
                replay_identity(manifest),
                resumed_at=None if found is None else state.rollout_id,
            )
        if recorded is not None:
            if found is not None:
                raise ConfigError(f"--replay-schedule: {folder.path} has begun already; say another --name.")
            await follow(session, recorded)
        hooks.run_start(
            RunStart(
                run=event,
                rollout_id=session.state.rollout_id,
                version=session.state.version,
                plugins=tuple(sorted({part.entry.qualified for part in run.parts})),
            )
        )
        stack.enter_context(settled_heap())
        stack.enter_context(
            LoopWatch(
                LOOP_HELD_S, lambda seconds, where: hooks.loop_held(LoopHeld(run=event, seconds=seconds, where=where))
            )
        )
        if config.rollout.use_fault_tolerance:
            for supervisor in supervisors(session, launcher):
                await stack.enter_async_context(supervisor)
        error: BaseException | None = None
        try:
            yield session
        except BaseException as raised:
            error = raised
            raise
        finally:
            hooks.run_end(
                RunEnd(run=event, rollout_id=session.state.rollout_id, version=session.state.version, error=error)
            )


def finish(
    tracker: Tracker, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    """On the way out of the run. What ended that is the one to tell, and may be the same: a server that is gone."""
    try:
        tracker.finish()
    except Exception as failed:
        if error is None:
            raise
        error.add_note(f"Then a tracker could not be finished: {failed}")


async def assemble_session(
    run: BoundRun,
    materials: Materials,
    launcher: Launcher,
    device: str,
    folder: RunFolder,
    event: Run,
    hooks: Hooks,
    stack: contextlib.AsyncExitStack,
    store: CheckpointStore,
    state: RunState,
) -> Session:
    """Starts trainers, engines and rewards, at the same time, and puts the session together."""
    config = run.config
    converter = () if materials.converter is None else (materials.converter,)
    agreement = Agreement.of((*run.parts, *converter), run.registry.plugin_files)
    with_engine = bool(run.generates or run.evals)
    rewards = start_rewards(run, stack)
    middlewares = build_middlewares(run)
    specs = EngineSpecs(
        run=run, agreement=agreement, device=device, run_dir=folder.path, model_config=materials.model_config
    )
    generators = build_generators(run, stack) if with_engine else {}
    try:
        async with asyncio.TaskGroup() as starting:
            trainers_task = starting.create_task(start_trained(run, materials, launcher, agreement, device, folder))
            # An engine that shares devices takes what is left of them: the trainers are asleep by then.
            first = trainers_task if config.launcher.colocate else None
            engines_task = starting.create_task(start_engines(specs, launcher, middlewares, with_engine, first))
            for generator in generators.values():
                starting.create_task(generator.open())
            for part in run.reward_parts:
                starting.create_task(warm_reward(rewards, part, engines_task))
    except ExceptionGroup as group:
        # One of them stops the others; the user wants to know of that one.
        raise next(
            (error for error in group.exceptions if isinstance(error, SlimeError)), group.exceptions[0]
        ) from None
    roles, engines = trainers_task.result(), engines_task.result()
    client = engines.policy
    residency = Residency(
        next(iter(roles.values())).devices if roles else Devices(),
        client,
        shared=config.launcher.colocate and bool(roles),
        offload_rollout=config.launcher.offloads_rollout(device),
    )

    failures: Counter[str] = Counter()
    trace = RolloutTrace(folder.traces if run.config.debug.trace_samples else None)
    stack.callback(trace.close)

    def on_failure(failure: SampleFailure, *, evaluation: bool) -> None:
        if isinstance(failure.error, RewardError) and not evaluation:
            failures[f"rollout/reward_outcome/{failure.error.outcome}"] += 1
        hooks.sample_failed(
            SampleFailed(
                run=event,
                prompt=failure.prompt,
                sample_index=failure.index,
                attempt=failure.attempt,
                will_retry=failure.will_retry,
                error=failure.error,
            )
        )

    def on_batch(rollout_id: int, version: int, batch: Batch, columns: TokenColumns) -> None:
        if run.config.debug.save_debug_train_data:
            write_train_data(train_data_file(folder.train_data, rollout_id), batch, columns)
        hooks.batch_ready(BatchReady(run=event, rollout_id=rollout_id, version=version, batch=batch, columns=columns))

    def runner(settings: GroupSettings, generate: Part) -> GroupRunner:
        assert client is not None
        return GroupRunner(
            settings,
            generator=generators[generate.spec().to_json()],
            client=client,
            tokenizer=materials.tokenizer,
            rewards=rewards,
            on_failure=partial(on_failure, evaluation=settings.evaluation),
            on_trace=trace.add,
            versions=lambda: session.trained_versions,
        )

    source = materials.source or NoSource()
    session = Session(
        run=run,
        event=event,
        folder=folder,
        num_rollout=materials.num_rollout,
        tokenizer=materials.tokenizer,
        buffer=DataBuffer(source, run.buffer_filter.build()),
        collector=run.collector.build(),
        runner=None if client is None else runner(training_settings(run), run.generate),
        filters=[part.build() for part in run.filters],
        client=client,
        served_engines=engines.served,
        middlewares=middlewares,
        roles=roles,
        learner=(
            Learner(
                roles,
                LearnerPlan.of(run),
                on_batch=on_batch,
                before_steps=lambda: session.between_steps.clear(),
                teacher=engines.teacher,
            )
            if roles
            else RolloutOnly(run.config.debug)
        ),
        residency=residency,
        transport=None if client is None or run.transport is None or not roles else run.transport.build(),
        evaluator=Evaluator(eval_tasks(run, materials, runner)),
        store=store,
        trackers=(),
        hooks=hooks,
        state=state,
        kept_ahead=[],
        saved_rollout_id=state.rollout_id,
        faults=failures,
        trace=trace,
    )
    return session


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


async def follow(session: Session, recorded: RecordedSchedule) -> None:
    """Makes engines and collector do as they did then."""
    assert session.client is not None, "a schedule of the same settings is of a run with engines"
    for index, events in recorded.engines.items():
        engine = session.client.engine(index)
        assert engine is not None
        await engine.call("follow", events)
    session.client.script = RequestScript(recorded.requests)
    session.record = PoolRecord(recorded.pool)


async def restore(session: Session, checkpoint: Path) -> None:
    """Takes on what a checkpoint holds."""
    async with session.residency.train():
        for name, trainers in session.roles.items():
            async with trainers.turn():
                await trainers.load(checkpoint / "trainer" / name)
    session.buffer.load(checkpoint / "buffer")
    session.kept_ahead = read_ahead(checkpoint, session.state)


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


def count_attempt(folder: RunFolder) -> int:
    """1 for the first start in this folder, one more for each that follows."""
    try:
        attempt = int(json.loads(folder.attempts.read_text())) + 1
    except FileNotFoundError:
        attempt = 1
    write_text(folder.attempts, json.dumps(attempt))
    return attempt


def drop_none(value: Any) -> Any:
    """TOML has no null: what is not set is left out."""
    if isinstance(value, Mapping):
        return {key: drop_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [drop_none(inner) for inner in value if inner is not None]
    return value
