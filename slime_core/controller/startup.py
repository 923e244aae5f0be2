"""Startup: a bound run to a Session, and its end. The order: data, folder, trainers and engines, state, observers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import tomlkit

from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.storage import check_writable, storage_errors
from slime_core.config.bound import BoundRun
from slime_core.contracts.hookspecs import Run, RunEnd, RunStart
from slime_core.contracts.launcher import LauncherSetup
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.assembly import RunPlace, assemble_session
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.controller.event_log import EventLog
from slime_core.controller.event_loop_watchdog import EventLoopWatchdog
from slime_core.controller.folder_lock import lock_folder
from slime_core.controller.gc_control import frozen_gc
from slime_core.controller.health import health_monitors
from slime_core.controller.learner import advantage_config
from slime_core.controller.manifest import Manifest, build_manifest, replay_identity
from slime_core.controller.run_folder import RunFolder, damaged
from slime_core.controller.run_inputs import RunInputs
from slime_core.controller.saving import read_ahead
from slime_core.controller.schedule import RecordedSchedule, ScheduleFile, read_schedule
from slime_core.controller.session import Session
from slime_core.controller.start_folder import StartFolder, StartOptions, choose_start, clear_folder, newest_checkpoint
from slime_core.errors import SlimeError
from slime_core.registry.boundary import foreign
from slime_core.registry.hooks import Hooks
from slime_core.rollout.request_replay import RequestReplay
from slime_core.workers.choose import choose_device
from slime_core.workers.engines import build_middlewares
from slime_core.workers.launcher import Launcher
from slime_core.workers.stopwatch import StartTimes

LOOP_HELD_S: Final = 30.0
"""Seconds for which the event loop may be blocked before the blocking code is reported."""


@contextlib.asynccontextmanager
async def start(
    run: BoundRun, inputs: RunInputs, options: StartOptions, observers: Mapping[str, object]
) -> AsyncIterator[Session]:
    """The running session; at exit everything is stopped and observers get `run_end`, also after an error."""
    fingerprint = "" if inputs.source is None else inputs.source.fingerprint()
    manifest = build_manifest(run, data_fingerprint=fingerprint)
    config = run.config
    device = choose_device(config.launcher.device)
    # Checked first: --fresh removes a run.
    recorded = None if options.replay is None else read_schedule(options.replay, replay_identity(manifest))
    place = choose_start(manifest, options)
    folder = place.folder
    if options.fresh:
        clear_folder(folder)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(storage_errors(folder.path))
        stack.enter_context(lock_folder(folder))
        attempt = count_attempt(folder)
        store = CheckpointStore(
            folder.checkpoints, keep=config.checkpoint.keep_checkpoints, checksum=config.checkpoint.checksum
        )
        found = newest_checkpoint(folder, options, checksum=config.checkpoint.checksum)
        state = RunState() if found is None else found[0]
        manifest = with_accepted(manifest, place, state.rollout_id)
        if not place.accepted:
            write_manifest(folder, manifest)
        event = Run(name=config.name, run_dir=folder.path, config=manifest.config, attempt=attempt)
        hooks = Hooks.load(run.registry, own={"slime/events": EventLog(folder.events), **observers})
        trackers = start_trackers(run, event, None if attempt == 1 else state.rollout_id, stack)
        shared = LauncherSetup(colocate=config.launcher.colocate, num_engines=config.launcher.num_engines)
        launcher: Launcher = run.launcher.driver.build_launcher(run.launcher.config, shared)
        stack.push_async_callback(launcher.stop)
        times = StartTimes.of_driver(options.began)
        parts = RunPlace(folder=folder, event=event, device=device, hooks=hooks, store=store, state=state, times=times)
        session = await assemble_session(run, inputs, launcher, parts, stack)
        session.trackers = trackers
        if found is not None:
            await restore(session, found[1])
        # Not before: a start that fails, as with changed plugins, leaves newer checkpoints in use, and the manifest as it was.
        if options.ckpt_step is not None:
            store.set_aside_after(options.ckpt_step)
        if place.accepted:
            write_manifest(folder, manifest)
        for line in place.notes:
            options.report(line)
        if run.records_schedule:
            resumed_at = None if found is None else state.rollout_id
            session.schedule = ScheduleFile(folder.schedule, replay_identity(manifest), resumed_at=resumed_at)
        if recorded is not None:
            await replay_events(session, recorded)
        plugins = tuple(sorted({part.entry.qualified for part in run.parts}))
        started = RunStart(run=event, rollout_id=state.rollout_id, version=state.version, plugins=plugins)
        hooks.emit(started)
        stack.enter_context(frozen_gc())
        stack.enter_context(EventLoopWatchdog(LOOP_HELD_S, parts.loop_blocked))
        if config.rollout.use_fault_tolerance:
            for monitor in health_monitors(session, launcher):
                await stack.enter_async_context(monitor)
        with run_end_event(session):
            yield session


def write_manifest(folder: RunFolder, manifest: Manifest) -> None:
    write_text(folder.manifest, manifest.to_json())
    write_text(folder.config, tomlkit.dumps(drop_none(manifest.config)))


def with_accepted(manifest: Manifest, place: StartFolder, rollout_id: int) -> Manifest:
    """The manifest with the changes that this run and its earlier attempts continued with."""
    accepted = list((place.earlier or {}).get("accepted_changes", ()))
    if place.accepted:
        # In a container a user may have no name.
        user = os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid())
        record = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "user": user, "host": socket.gethostname()}
        changes = [asdict(change) for change in place.accepted]
        accepted.append({**record, "rollout_id": rollout_id, "changes": changes})
    return replace(manifest, accepted_changes=accepted)


def rehearse(run: BoundRun, inputs: RunInputs, options: StartOptions) -> tuple[Manifest, StartFolder, RunState | None]:
    """Raises what `start` would raise before any process is started, and starts and writes nothing. Returns the run's manifest,
    where it would begin or continue, and the state that it would continue from."""
    manifest = build_manifest(run, data_fingerprint="" if inputs.source is None else inputs.source.fingerprint())
    choose_device(run.config.launcher.device)
    if options.replay is not None:
        read_schedule(options.replay, replay_identity(manifest))
    place = choose_start(manifest, options)
    found = None if options.fresh else newest_checkpoint(place.folder, options, checksum=False)
    check_writable(place.folder.path)
    Hooks.load(run.registry)
    build_middlewares(run)
    advantage_config(run, run.algo)
    evals = [part for settings in run.evals if (part := settings.generate) is not None]
    rewards = [part for part in run.reward_parts if not part.driver.needs_reward_model(part.config)]
    for part in (run.buffer_filter, run.collector, *run.filters, *run.trackers, run.generate, *evals, *rewards):
        part.build()
    return manifest, place, None if found is None else found[0]


def start_trackers(
    run: BoundRun, event: Run, resumed_at: int | None, stack: contextlib.AsyncExitStack
) -> Sequence[Tracker]:
    """Starts the trackers. They are finished at the end of the run, the last one first."""
    trackers = [part.build() for part in run.trackers]
    info = RunInfo(
        name=event.name, run_dir=event.run_dir, config=event.config, attempt=event.attempt, resumed_at=resumed_at
    )
    for tracker in trackers:
        with foreign(tracker, "start"):
            tracker.start(info)
        stack.push(partial(finish, tracker))
    return trackers


@contextlib.contextmanager
def run_end_event(session: Session) -> Iterator[None]:
    """Emits `run_end` at exit, with the error that ended the run."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        state = session.state
        session.hooks.emit(RunEnd(run=session.event, rollout_id=state.rollout_id, version=state.version, error=error))


def finish(
    tracker: Tracker, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    """At exit of the run. The error that ended the run is raised; the tracker's may have the same cause, a lost server."""
    try:
        with foreign(tracker, "finish"):
            tracker.finish()
    except SlimeError as failed:
        if error is None:
            raise
        error.add_note(f"Then a tracker could not be finished: {failed}")


async def replay_events(session: Session, recorded: RecordedSchedule) -> None:
    """Sets up engines and collector to replay a recorded schedule."""
    assert session.client is not None, "a schedule of the same settings is of a run with engines"
    for index, events in recorded.engines.items():
        engine = session.client.engine(index)
        assert engine is not None
        await engine.call("replay_events", events)
    session.client.script = RequestReplay(recorded.requests)
    session.collector.replay_events(recorded.pool)


async def restore(session: Session, checkpoint: Path) -> None:
    """Loads a checkpoint into the session."""
    async with session.colocation.train():
        for name, trainers in session.roles.items():
            async with trainers.turn():
                await trainers.load(checkpoint / "trainer" / name)
    session.buffer.load(checkpoint / "buffer")
    session.kept_ahead = read_ahead(checkpoint, session.state)


def count_attempt(folder: RunFolder) -> int:
    """1 for the first start in this folder, one more for each that follows."""
    try:
        attempt = int(json.loads(folder.attempts.read_text())) + 1
    except FileNotFoundError:
        attempt = 1
    except (ValueError, TypeError) as error:
        raise damaged(folder.attempts, error, "Write the number of the last attempt into it, such as 1") from error
    write_text(folder.attempts, json.dumps(attempt))
    return attempt


def drop_none(value: Any) -> Any:
    """`value` without None values: TOML has no null."""
    if isinstance(value, Mapping):
        return {key: drop_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [drop_none(inner) for inner in value if inner is not None]
    return value
