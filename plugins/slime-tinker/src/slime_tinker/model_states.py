"""ModelStates: saved states of the models in the trainers, from which a restart begins."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from slime_core.errors import SlimeError
from slime_tinker.checkpoints import Checkpoints, stored
from slime_tinker.journal import Statement, body_dropped
from slime_tinker.models import Models
from slime_tinker.notes import note
from slime_tinker.records import RequestRecord
from slime_tinker.settings import Settings

SAVING_SHARE: Final = 10
"""A model trains at least so many times as long as its last saving took before it is saved again."""


@dataclass(slots=True)
class Live:
    """A model in the trainers."""

    applied: int = -1
    """seq_id of the last request that was run."""
    steps: int = 0
    created: bool = False
    gradients: bool = False
    """It has some that no optimizer step has taken; its saved state never has."""
    changing: bool = False
    """A request that changes it has begun, and has not ended: what the trainers hold is of no seq_id."""
    loaded: int = -1
    """seq_id of the last request that loaded a checkpoint."""
    unsaved_s: float = 0.0
    """Seconds of training that its saved state does not hold."""
    retry_at: float = 0.0
    """Its state could not be saved; it is not tried again before this time (monotonic)."""
    saving_s: float = 0.0
    """Of its last saving."""
    rest: asyncio.Task[None] | None = None
    """Of the last request that was run; it follows that of the one before."""
    unloading: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedState:
    """A model's whole state after its request `applied`, which is not written yet."""

    folder: str
    write: Callable[[], None]
    applied: int
    steps: int
    trained_s: float
    """Seconds of training that no state held before."""
    staging_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    models: Models
    checkpoints: Checkpoints
    settings: Settings
    trainer: Executor

    async def staged_if_due(self, record: RequestRecord, live: Live) -> StagedState | None:
        """The model's state, if a restart would have to repeat much; always after it was loaded, since its checkpoint may be
        deleted."""
        due = max(self.settings.save_after_s, SAVING_SHARE * live.saving_s)
        if record.kind != "load_weights" and (live.unsaved_s < due or time.monotonic() < live.retry_at):
            return None
        try:
            return await self._staged(record.owner, live)
        except SlimeError as error:
            self.keep_earlier(record.owner, live, error)
            return None

    async def _staged(self, name: str, live: Live) -> StagedState:
        began = time.monotonic()
        folder = self.checkpoints.new_folder()
        write = await asyncio.get_running_loop().run_in_executor(
            self.trainer, partial(self.models.save, name, self.checkpoints.folder_of(folder), optimizer=True)
        )
        trained_s, live.unsaved_s = live.unsaved_s, 0.0
        took = time.monotonic() - began
        return StagedState(
            folder=folder, write=write, applied=live.applied, steps=live.steps, trained_s=trained_s, staging_s=took
        )

    async def kept(self, name: str, live: Live, state: StagedState) -> list[Statement]:
        """Writes it; with the statements a restart begins from it."""
        began = time.monotonic()
        await asyncio.to_thread(stored, self.checkpoints.folder_of(state.folder), state.write)
        live.saving_s = state.staging_s + time.monotonic() - began
        if state.applied >= live.loaded:
            self.checkpoints.needed.pop(name, None)
        saved = replace(
            self.checkpoints.holdings.models[name], state=state.folder, applied=state.applied, steps=state.steps
        )
        return [self.checkpoints.holdings.put(saved), body_dropped(name, state.applied)]

    def keep_earlier(self, name: str, live: Live, error: SlimeError) -> None:
        """After a state that could not be saved. A restart begins from the earlier one and repeats the requests since, which
        the journal keeps: no result that a client has is lost."""
        live.retry_at = time.monotonic() + self.settings.save_after_s
        note(f"{name}: its state is not saved, and is tried again later: {error}")

    async def save_all(self, live_models: Mapping[str, Live]) -> None:
        """Before the server ends, so that the next start has nothing to repeat. Models with gradients are left as they are."""
        for name, live in live_models.items():
            unsaved = live.unsaved_s or self.checkpoints.needed.get(name)
            if not live.created or not unsaved or live.gradients or live.changing:
                continue
            earlier = self.checkpoints.holdings.models[name].state
            try:
                await self.checkpoints.journal.write(await self.kept(name, live, await self._staged(name, live)))
            except SlimeError as error:
                note(f"{name}: its state is not saved; the next start repeats what it lacks: {error}")
                continue
            if earlier is not None:
                await asyncio.to_thread(shutil.rmtree, self.checkpoints.folder_of(earlier), True)
