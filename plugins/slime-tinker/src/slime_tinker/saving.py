"""Saving: requests that save a model under a path, to be continued or sampled from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial

from tinker.types import SaveWeightsForSamplerRequest, SaveWeightsRequest

from slime_tinker.checkpoints import Checkpoints, expiry, stored
from slime_tinker.errors import RequestError
from slime_tinker.futures import json_outcome
from slime_tinker.model_settings import require_small
from slime_tinker.model_states import Live
from slime_tinker.models import Models
from slime_tinker.records import CheckpointRecord, ModelRecord, Outcome, RequestRecord, SamplerRecord
from slime_tinker.request_halves import Done, Rest
from slime_tinker.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    models: Models
    checkpoints: Checkpoints
    settings: Settings
    trainer: Executor
    _saving: set[str] = field(default_factory=set)
    """Paths of checkpoints that are being written."""

    async def save(self, record: RequestRecord, live: Live) -> Rest:
        asked = SaveWeightsRequest.model_validate_json(record.body)
        model, name = self.checkpoints.holdings.models[record.owner], asked.path or f"{record.seq:06d}"
        path = self._path_of(model, "training", name, overwrite=asked.overwrite)
        made = await self._made(model, live, path, name, "training", asked.ttl_seconds, asked.user_metadata)
        return self._written(made, json_outcome({"type": "save_weights", "path": path}))

    async def save_for_sampler(self, record: RequestRecord, live: Live) -> Rest:
        asked = SaveWeightsForSamplerRequest.model_validate_json(record.body)
        model = self.checkpoints.holdings.models[record.owner]
        if asked.kind != "snapshot":
            raise RequestError(
                f'kind "{asked.kind}": not served here; this server samples from snapshots ("snapshot").'
            )
        if asked.path is not None:
            path = self._path_of(model, "sampler", asked.path)
            made = await self._made(model, live, path, asked.path, "sampler", asked.ttl_seconds, asked.user_metadata)
            return self._written(made, json_outcome({"type": "save_weights_for_sampler", "path": path}))
        if asked.sampling_session_seq_id is None:
            raise RequestError("sampling_session_seq_id: missing, and so is path; one of them is needed.")
        sampler_id = f"{model.session}:sampler:{asked.sampling_session_seq_id}"
        path = f"tinker://{model.id}/snapshots/{record.seq}"
        made = await self._made(model, live, path, str(record.seq), "sampler", None, None, hidden=True)
        written = self._written(
            made, json_outcome({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})
        )

        async def rest() -> Done:
            done = await written()
            sampler = SamplerRecord(
                id=sampler_id, tenant=model.tenant, session=model.session, created=time.time(), checkpoint=path
            )
            statements = [*done.statements, self.checkpoints.holdings.put(sampler)]
            await self.checkpoints.delete_snapshots(
                model.id, keep=self.settings.limits.snapshots(whole=self.models.whole)
            )
            return replace(done, statements=statements)

        return rest

    def _path_of(self, model: ModelRecord, kind: str, name: str, *, overwrite: bool = False) -> str:
        path = self.checkpoints.path_of(model, kind, name, overwrite=overwrite)
        if path in self._saving and not overwrite:
            raise RequestError(f'path "{name}": {path} is being written. Pass another name, or overwrite=True.')
        return path

    async def _made(
        self,
        model: ModelRecord,
        live: Live,
        path: str,
        name: str,
        kind: str,
        ttl_s: int | None,
        metadata: dict[str, str] | None,
        *,
        hidden: bool = False,
    ) -> tuple[CheckpointRecord, Callable[[], None]]:
        """A checkpoint of the model as it is now, and what writes its files."""
        if self.models.whole and live.gradients:
            raise RequestError("saved between forward_backward and optim_step: call optim_step first.")
        require_small(metadata, self.settings.limits.max_metadata_bytes)
        expires, folder = expiry(ttl_s), self.checkpoints.new_folder()
        target = self.checkpoints.folder_of(folder)
        write = await asyncio.get_running_loop().run_in_executor(
            self.trainer, partial(self.models.save, model.id, target, optimizer=kind == "training")
        )
        self._saving.add(path)
        record = CheckpointRecord(
            id=path,
            tenant=model.tenant,
            model=model.id,
            name=name,
            kind=kind,
            folder=folder,
            spec=model.spec,
            created=time.time(),
            size=0,
            steps=live.steps,
            expires=expires,
            user_metadata=metadata,
            hidden=hidden,
        )
        return record, write

    def _written(self, made: tuple[CheckpointRecord, Callable[[], None]], outcome: Outcome) -> Rest:
        """Its files are on the disk before anything refers to them."""
        record, write = made

        async def rest() -> Done:
            target = self.checkpoints.folder_of(record.folder)
            try:
                size = await asyncio.to_thread(stored, target, write)
            finally:
                self._saving.discard(record.id)
            statement, replaced = self.checkpoints.put(replace(record, size=size))
            return Done(outcome=outcome, statements=[statement], replaced=replaced)

        return rest
