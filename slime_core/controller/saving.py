"""A run's checkpoints, written at once or while the run continues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.contracts.hookspecs import CheckpointSaved
from slime_core.controller.checkpoint import PendingCheckpoint, RunState, discard_on_error
from slime_core.controller.session import Session
from slime_core.data.table import read_groups, write_groups
from slime_core.errors import NonfiniteWeights, RankTimeout
from slime_core.registry.boundary import held
from slime_core.types.sample import SampleGroup
from slime_core.workers.train_group import TrainGroup


class CheckpointSaver:
    """One checkpoint at a time: the next waits until the one before is complete."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._beside: asyncio.Task[None] | None = None
        """A checkpoint that is being written while the run continues."""

    async def save(self, ahead: Sequence[Sequence[SampleGroup]], *, broken: str | None = None) -> None:
        """Writes a checkpoint of the run's current state. `ahead`: the groups of steps that were collected ahead. With
        `checkpoint.async_save` it is complete only after `completed`. `broken`: why the steps up to it cannot be replayed."""
        session, began = self._session, time.perf_counter()
        await self.completed()
        await self._write_schedule(broken)
        state = replace(session.state, seconds=session.state.seconds + began - session.started)
        aside = session.run.config.checkpoint.async_save
        staged: list[TrainGroup] = []

        async def write(folder: Path) -> None:
            (folder / "buffer").mkdir()
            async with session.colocation.train():
                for name, trainers in session.roles.items():
                    (folder / "trainer" / name).mkdir(parents=True)
                    async with trainers.turn():
                        await (trainers.stage if aside else trainers.save)(folder / "trainer" / name)
                    if aside:
                        staged.append(trainers)
            session.buffer.save(folder / "buffer")
            for offset, groups in enumerate(ahead):
                write_groups(ahead_file(folder, state.rollout_id + offset), list(groups))

        try:
            unfinished = await session.store.begin(state, write)
        except Exception:
            # Ranks that still write recreate the folder, which was removed.
            await asyncio.gather(*(trainers.written() for trainers in staged), return_exceptions=True)
            session.store.sweep()
            raise
        if aside:
            blocked_s = time.perf_counter() - began
            self._beside = asyncio.create_task(self._complete_beside(state, unfinished, began, blocked_s))
        else:
            # Everything is in its files: only the health checks of engines run while the disk is waited for.
            self._report_saved(state, await asyncio.to_thread(session.store.complete, unfinished), began)

    async def keep_schedule(self) -> None:
        """Appends the events since the last step to the schedule: engines and pool would keep them until the next
        checkpoint, and there may be none before the end."""
        session = self._session
        if session.schedule is None:
            return
        engines = {} if session.client is None else await session.client.call_by_index("drain_events")
        heard = session.collector.drain_events()
        # Steps after the loss of an engine cannot be replayed.
        if session.client is None or not session.client.num_lost:
            session.schedule.add(engines, heard)

    async def completed(self) -> None:
        """Returns when no checkpoint is being written; raises what kept one from being complete."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            await beside

    async def raise_if_failed(self) -> None:
        """Raises the error of the checkpoint that was being written, once it has failed."""
        if self._beside is not None and self._beside.done():
            await self.completed()

    async def give_up(self) -> None:
        """Cancels a checkpoint that is still being written; the one before it stays."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
            self._beside = None

    async def save_unsaved(self, ahead: Sequence[Sequence[SampleGroup]], *, after: Exception) -> None:
        """Writes a complete checkpoint if anything was trained since the last one and no optimizer step is under way. It also
        replaces one that was being written and failed; that error is raised only if nothing can be written. Where `after`,
        which ended the run, means that the trainers' state is lost, it is raised with what to type."""
        session = self._session
        if isinstance(after, RankTimeout):
            raise RankTimeout(f"{after} {self._way_back('start the same command again')}") from None
        with held() as failed:
            await self.completed()
        unsaved = session.state.rollout_id > session.saved_rollout_id
        if unsaved and failed.error is not None and not session.optimizer_idle.is_set():
            raise failed.error
        if unsaved and session.optimizer_idle.is_set():
            await self.save(
                ahead, broken="the run was ended from outside, or by an error, at an instant that nothing records"
            )
            await self.completed()
        if isinstance(after, NonfiniteWeights):
            steps = session.store.steps()
            older = f", and --ckpt-step {steps[-2]} for an older one" if len(steps) > 1 else ""
            way_back = self._way_back(f"pass --resume {session.folder.path} with it{older}")
            raise NonfiniteWeights(f"{after} {way_back}") from None

    def _way_back(self, resume: str) -> str:
        """What to type where the trainers' state is lost. `resume`: if there is a checkpoint."""
        run, steps = self._session.folder.path, self._session.store.steps()
        if not steps:
            return "There is no checkpoint yet: start over with --fresh."
        return f"To continue from the last checkpoint, {run}/checkpoints/step_{steps[-1]}, {resume}."

    async def _complete_beside(
        self, state: RunState, unfinished: PendingCheckpoint, began: float, blocked_s: float
    ) -> None:
        with discard_on_error(unfinished):
            for trainers in self._session.roles.values():
                await trainers.written()
        path = await asyncio.to_thread(self._session.store.complete, unfinished)
        self._report_saved(state, path, began, blocked_s)

    def _report_saved(self, state: RunState, path: Path, began: float, blocked_s: float | None = None) -> None:
        session, seconds = self._session, time.perf_counter() - began
        session.saved_rollout_id = state.rollout_id
        session.hooks.emit(
            CheckpointSaved(
                run=session.event,
                rollout_id=state.rollout_id,
                version=state.version,
                path=path,
                seconds=seconds,
                blocked_seconds=seconds if blocked_s is None else blocked_s,
            )
        )

    async def _write_schedule(self, broken: str | None) -> None:
        session = self._session
        if session.schedule is None:
            return
        if session.client is not None and session.client.num_lost:
            broken = "an engine was lost"
        # The run may have ended because of an engine.
        asked = session.client is not None and broken is None
        engines = await session.client.call_by_index("drain_events") if session.client is not None and asked else {}
        heard = session.collector.drain_events()
        session.schedule.checkpoint(session.state.rollout_id, engines, heard, broken=broken)
        if session.client is not None:
            session.client.script.next_part()


def ahead_file(folder: Path, step: int) -> Path:
    return folder / f"ahead_{step}.parquet"


def read_ahead(folder: Path, state: RunState) -> list[list[SampleGroup]]:
    """The groups of the steps that were collected ahead of the checkpoint's state."""
    return [read_groups(ahead_file(folder, step)) for step in range(state.rollout_id, state.next_collect)]
