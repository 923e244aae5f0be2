"""Service: a running server without its HTTP: everything that it holds, and what it does beside requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tinker.types import (
    CreateModelRequest,
    CreateSamplingSessionRequest,
    CreateSessionRequest,
    LoadWeightsRequest,
)

from slime_core.errors import SlimeError, StorageError
from slime_core.registry import Registry
from slime_tinker.admission import Admission
from slime_tinker.checkpoints import Checkpoints
from slime_tinker.errors import RequestError
from slime_tinker.futures import Futures
from slime_tinker.holdings import Holdings
from slime_tinker.journal import Journal, expired_results, forgotten
from slime_tinker.model_settings import require_small, spec_of
from slime_tinker.model_states import ModelStates
from slime_tinker.models import Models, ModelSpec
from slime_tinker.notes import note
from slime_tinker.records import ModelRecord, RequestRecord, SamplerRecord, SessionRecord
from slime_tinker.sampler_weights import OpenWeights
from slime_tinker.sampling import Sampling
from slime_tinker.saving import Saving
from slime_tinker.settings import Settings
from slime_tinker.training import Training, request_id
from slime_tinker.turns import Turns

CLEANING_S: Final = 30.0
"""Seconds between two looks for what has expired."""


@dataclass(slots=True)
class Service:
    models: Models
    settings: Settings
    journal: Journal
    holdings: Holdings
    futures: Futures
    turns: Turns
    checkpoints: Checkpoints
    training: Training
    sampling: Sampling
    started: float = field(default_factory=time.time)

    # --- Sessions -----------------------------------------------------------------------------------------------------

    async def create_session(self, asked: CreateSessionRequest, tenant: str) -> SessionRecord:
        require_small(asked.user_metadata, self.settings.limits.max_metadata_bytes)
        # Numbers of sessions are the tenant's own, so that what it draws does not depend on other tenants.
        own = [record for record in self.holdings.sessions.values() if record.tenant == tenant]
        number = 1 + max((int(record.id.rpartition("-")[2]) for record in own), default=0)
        now = time.time()
        session = SessionRecord(
            id=f"{tenant}-{number}",
            tenant=tenant,
            created=now,
            seen=now,
            user_metadata=asked.user_metadata,
            display_name=asked.display_name,
        )
        await self.journal.write([self.holdings.put(session)])
        return session

    def saw(self, session_id: str, tenant: str) -> None:
        """Only in memory: after a restart every session counts as just seen."""
        session = self.holdings.session(session_id, tenant)
        self.holdings.sessions[session.id] = replace(session, seen=time.time())

    async def finish_session(self, session: SessionRecord, why: str) -> None:
        """Its models leave the trainers, and what was not saved under a name is deleted."""
        try:
            await self.journal.write([self.holdings.put(replace(session, finished=True))])
        except StorageError:
            # To be ended again: nothing else ends its models.
            self.holdings.put(session)
            raise
        samplers = self.holdings.samplers_of(session.id)
        left = [statement for own in samplers for statement in (self.holdings.remove(own), forgotten(own.id))]
        # First, since snapshots are deleted when nothing samples from them.
        for sampler in samplers:
            await self.sampling.cancel_of(sampler.id, why)
        await self.journal.write(left, lasting=True)
        for model in self.holdings.models_of(session.id):
            await self.training.unload(model, why)
            await self.checkpoints.delete_snapshots(model.id, keep=0)
            await self.journal.write([forgotten(model.id)], lasting=True)

    # --- Models -------------------------------------------------------------------------------------------------------

    async def create_model(self, asked: CreateModelRequest, body: bytes, tenant: str) -> RequestRecord:
        self._require_base(asked.base_model, "base_model")
        spec = spec_of(asked, whole=self.models.whole)
        return await self._begin_model(
            asked.session_id, asked.model_seq_id, spec, asked.user_metadata, "create_model", body, tenant
        )

    async def load_model(self, asked: LoadWeightsRequest, body: bytes, tenant: str) -> RequestRecord:
        """A new model that begins as a checkpoint."""
        if asked.session_id is None or asked.model_seq_id is None:
            raise RequestError("load_weights: neither model_id and seq_id nor session_id and model_seq_id.")
        if asked.base_model is not None:
            self._require_base(asked.base_model, "base_model")
        if asked.weights_access_token is not None:
            raise RequestError("weights_access_token: checkpoints of other tenants cannot be loaded here.")
        checkpoint = self.holdings.checkpoint(asked.path, tenant)
        return await self._begin_model(
            asked.session_id, asked.model_seq_id, checkpoint.spec, asked.user_metadata, "load_weights", body, tenant
        )

    async def _begin_model(
        self,
        session_id: str,
        number: int,
        spec: ModelSpec,
        metadata: dict[str, Any] | None,
        kind: str,
        body: bytes,
        tenant: str,
    ) -> RequestRecord:
        require_small(metadata, self.settings.limits.max_metadata_bytes)
        session = self.holdings.session(session_id, tenant)
        model_id = f"{session.id}:train:{number}"
        record = self.request(model_id, 0, kind, body, tenant)
        if model_id in self.holdings.models:
            # Sent twice. It is written down when this write is, which follows the first one's, unless that fails.
            await self.journal.write([])
        if model_id in self.holdings.models:
            return record
        own = sum(model.tenant == tenant and not model.unloaded for model in self.holdings.models.values())
        most = self.settings.limits.max_models
        if own >= most:
            raise RequestError(
                f"create_model: you have {own} models in the trainers, the most there may be; close a client."
            )
        if self.training.num_live >= self.models.max_models:
            if self.models.whole:
                raise RequestError(
                    "create_model: this server trains all weights of one model at a time, and another model has its place. Try "
                    "again when its client has closed; load_state loads a checkpoint into a model that is there."
                )
            raise RequestError(
                f"create_model: this server trains {self.models.max_models} models at a time, and all places are taken. "
                "Try again when another client has closed."
            )
        now = time.time()
        model = ModelRecord(
            id=model_id, tenant=tenant, session=session.id, spec=spec, created=now, seen=now, user_metadata=metadata
        )
        self.training.open(model_id, tenant)
        try:
            await self.training.submit(record, self.holdings.put(model))
        except StorageError:
            # Sent again, it is a new one.
            self.training.forget(model_id)
            self.holdings.remove(model)
            raise
        return record

    def require_room(self, tenant: str) -> None:
        """RequestError with a status after which the SDK sends again."""
        if self.futures.num_of(tenant) >= self.settings.limits.max_pending:
            raise RequestError(
                f"you have {self.settings.limits.max_pending} requests without a result, the most there may be.",
                status=429,
            )
        most = self.settings.limits.max_pending_bytes
        if self.futures.bytes_of(tenant) >= most:
            raise RequestError(
                f"your requests without a result have {most} bytes or more, the most there may be.", status=429
            )

    def _require_base(self, name: str, field: str) -> None:
        if name != self.models.base.name:
            raise RequestError(f'{field} "{name}": this server has "{self.models.base.name}".')

    # --- Sampling -----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, asked: CreateSamplingSessionRequest, tenant: str) -> SamplerRecord:
        session = self.holdings.session(asked.session_id, tenant)
        if asked.base_model is not None:
            self._require_base(asked.base_model, "base_model")
        if asked.model_path is None and asked.base_model is None:
            raise RequestError("create_sampling_session: neither model_path nor base_model.")
        checkpoint = None if asked.model_path is None else self.holdings.checkpoint(asked.model_path, tenant)
        if checkpoint is not None and checkpoint.kind != "sampler" and self.models.whole:
            raise RequestError(
                f"model_path {asked.model_path}: a state for training. save_weights_for_sampler writes weights for sampling."
            )
        sampler = SamplerRecord(
            id=f"{session.id}:sampler:{asked.sampling_session_seq_id}",
            tenant=tenant,
            session=session.id,
            created=time.time(),
            checkpoint=None if checkpoint is None else checkpoint.id,
        )
        await self.journal.write([self.holdings.put(sampler)])
        return sampler

    def request(self, owner: str, seq: int, kind: str, body: bytes, tenant: str) -> RequestRecord:
        return RequestRecord(
            id=request_id(owner, seq), owner=owner, seq=seq, kind=kind, tenant=tenant, body=body, created=time.time()
        )

    # --- Beside requests ----------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """What was there when the server ended. Its clients have not been heard since."""
        now = time.time()
        for session in list(self.holdings.sessions.values()):
            self.holdings.sessions[session.id] = replace(session, seen=now)
        await self.journal.write(self.holdings.clear_finished())
        await self.checkpoints.clear_orphans()
        await self.training.restore()
        await self.sampling.restore()

    async def clean(self) -> None:
        """For ever: what has expired."""
        while True:
            await asyncio.sleep(CLEANING_S)
            try:
                await self.clean_once()
            except SlimeError as error:
                # The disk may have room again the next time.
                note(f"what has expired is not deleted yet: {error}")

    async def clean_once(self) -> None:
        retention, now = self.settings.retention, time.time()
        # What follows may wait for others to end.
        self.turns.skip_gaps(time.monotonic() - retention.gap_s)
        for name in list(self.holdings.sessions):
            # Looked up in its turn: it may have been heard of, or have ended, while others were ended.
            session = self.holdings.sessions[name]
            if not session.finished and session.seen < now - retention.session_s:
                minutes = retention.session_s / 60
                await self.finish_session(session, f"nothing was heard of this session for {minutes:g} minutes.")
        await self.checkpoints.delete_expired()
        # Results from before the start have not been fetched since: their clients waited for the server.
        if self.started <= now - retention.result_s:
            await self.journal.write([expired_results(now - retention.result_s)])


@contextlib.asynccontextmanager
async def running(models: Models, settings: Settings, registry: Registry) -> AsyncIterator[Service]:
    """A service that has taken up what its folder holds. Ends with an error if one of its parts does. ConfigError for a folder
    with models of another kind."""
    journal = Journal(settings.state / "journal.sqlite")
    holdings = Holdings.of(journal)
    holdings.require_kind(whole=models.whole, folder=settings.state)
    trainer = ThreadPoolExecutor(1, "trainer")
    ending = False
    try:
        async with asyncio.TaskGroup() as tasks:
            service = service_of(models, settings, registry, journal, holdings, trainer, tasks)
            await service.restore()
            work = [tasks.create_task(service.turns.run()), tasks.create_task(service.clean())]
            yield service
            ending = True
            journal.end()
            service.sampling.stop()
            for task in work:
                task.cancel()
        await service.training.save_states()
    except* StorageError as errors:
        if not ending:
            raise
        note(f"results are not written, and begin again with the next start: {errors.exceptions[0]}")
    finally:
        trainer.shutdown()
        await journal.close()


def service_of(
    models: Models,
    settings: Settings,
    registry: Registry,
    journal: Journal,
    holdings: Holdings,
    trainer: Executor,
    tasks: asyncio.TaskGroup,
) -> Service:
    open_weights = OpenWeights(models, trainer)
    checkpoints = Checkpoints(
        root=settings.state / "weights",
        holdings=holdings,
        journal=journal,
        open_weights=open_weights,
        max_per_tenant=settings.limits.max_checkpoints,
    )
    futures, turns = Futures(journal, poll_s=settings.poll_s), Turns()
    states = ModelStates(models=models, checkpoints=checkpoints, settings=settings, trainer=trainer)
    saving = Saving(models=models, checkpoints=checkpoints, settings=settings, trainer=trainer)
    training = Training(
        models=models,
        holdings=holdings,
        journal=journal,
        futures=futures,
        turns=turns,
        checkpoints=checkpoints,
        states=states,
        saving=saving,
        settings=settings,
        registry=registry,
        trainer=trainer,
        tasks=tasks,
    )
    sampling = Sampling(
        models=models,
        holdings=holdings,
        journal=journal,
        futures=futures,
        checkpoints=checkpoints,
        open_weights=open_weights,
        admission=Admission(settings.sampling_places),
        limits=settings.limits,
        tasks=tasks,
    )
    return Service(
        models=models,
        settings=settings,
        journal=journal,
        holdings=holdings,
        futures=futures,
        turns=turns,
        checkpoints=checkpoints,
        training=training,
        sampling=sampling,
    )
