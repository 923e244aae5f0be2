"""A run's checkpoints, written at once or while the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slime_core.contracts.hookspecs import CheckpointSaved
from slime_core.controller.checkpoint import RunState, Unfinished, whole_or_not_at_all
from slime_core.controller.session import Session
from slime_core.data.table import read_groups, write_groups
from slime_core.types.sample import SampleGroup
from slime_core.workers.train_group import Trainers


class Saving:
    """One checkpoint at a time: the next waits until the one before is complete."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._beside: asyncio.Task[None] | None = None
        """A checkpoint that is being written while the run goes on."""

    async def save(self, ahead: Sequence[Sequence[SampleGroup]], *, broken: str | None = None) -> None:
        """A checkpoint of the run's state as it is, with the groups of steps that were collected ahead. With
        `checkpoint.async_save` it is complete only after `completed`. `broken`: why what led to it cannot be repeated."""
        session, began = self._session, time.perf_counter()
        await self.completed()
        await self._write_schedule(broken)
        state = replace(session.state, seconds=session.state.seconds + began - session.started)
        aside = session.run.config.checkpoint.async_save
        staged: list[Trainers] = []

        async def write(folder: Path) -> None:
            (folder / "buffer").mkdir()
            async with session.residency.train():
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
            # Ranks that write beside had the folder removed under them, and make it anew.
            await asyncio.gather(*(trainers.written() for trainers in staged), return_exceptions=True)
            session.store.sweep()
            raise
        if aside:
            blocked_s = time.perf_counter() - began
            self._beside = asyncio.create_task(self._complete_beside(state, unfinished, began, blocked_s))
        else:
            # Everything is in its files: the disk is waited for while engines are watched, and nothing else goes on.
            self._tell(state, await asyncio.to_thread(session.store.complete, unfinished), began)

    async def keep_schedule(self) -> None:
        """Writes down what decided the bits since the last step: engines and pool would keep it until the next checkpoint,
        and there may be none before the end."""
        session = self._session
        if session.schedule is None:
            return
        engines = {} if session.client is None else await session.client.ask("recorded")
        heard = session.collector.recorded()
        # What follows the loss of an engine cannot be repeated.
        if session.client is None or not session.client.num_lost:
            session.schedule.add(engines, heard)

    async def completed(self) -> None:
        """Returns when no checkpoint is being written; raises what kept one from being complete."""
        if self._beside is not None:
            beside, self._beside = self._beside, None
            await beside

    async def raise_if_failed(self) -> None:
        """What kept the checkpoint that was being written from being complete, as soon as it is known."""
        if self._beside is not None and self._beside.done():
            await self.completed()

    async def give_up(self) -> None:
        """Of a checkpoint that is still being written nothing stays; the one before it does."""
        if self._beside is not None:
            self._beside.cancel()
            await asyncio.gather(self._beside, return_exceptions=True)
            self._beside = None

    async def save_unsaved(self, ahead: Sequence[Sequence[SampleGroup]]) -> None:
        """A complete checkpoint, if anything was trained since the last one; none of trainers that are within a step. One that
        was being written and fails is made up for; its error is raised only if nothing can be."""
        session = self._session
        failed: Exception | None = None
        try:
            await self.completed()
        except Exception as error:  # noqa: BLE001 - what ended the run is the one to tell, unless this is not made up for
            failed = error
        unsaved = session.state.rollout_id > session.saved_rollout_id
        if unsaved and failed is not None and not session.between_steps.is_set():
            raise failed
        if unsaved and session.between_steps.is_set():
            await self.save(
                ahead, broken="the run was ended from outside, or by an error, at an instant that nothing records"
            )
            await self.completed()

    async def _complete_beside(self, state: RunState, unfinished: Unfinished, began: float, blocked_s: float) -> None:
        with whole_or_not_at_all(unfinished):
            for trainers in self._session.roles.values():
                await trainers.written()
        path = await asyncio.to_thread(self._session.store.complete, unfinished)
        self._tell(state, path, began, blocked_s)

    def _tell(self, state: RunState, path: Path, began: float, blocked_s: float | None = None) -> None:
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
        # Engines may be what ended the run.
        asked = session.client is not None and broken is None
        engines = await session.client.ask("recorded") if session.client is not None and asked else {}
        heard = session.collector.recorded()
        session.schedule.checkpoint(session.state.rollout_id, engines, heard, broken=broken)
        if session.client is not None:
            session.client.script.next_part()


def ahead_file(folder: Path, step: int) -> Path:
    return folder / f"ahead_{step}.parquet"


def read_ahead(folder: Path, state: RunState) -> list[list[SampleGroup]]:
    """The groups of the steps that were collected ahead of the checkpoint's state."""
    return [read_groups(ahead_file(folder, step)) for step in range(state.rollout_id, state.next_collect)]
