"""Holdings: sessions, models, checkpoints and sampling sessions, each of one tenant. Another tenant's are as if not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from slime_core.errors import ConfigError
from slime_tinker.errors import RequestError, not_found
from slime_tinker.journal import Journal, Record, Statement, forgotten, put, removed
from slime_tinker.records import CheckpointRecord, ModelRecord, SamplerRecord, SessionRecord


@dataclass(slots=True)
class Holdings:
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    models: dict[str, ModelRecord] = field(default_factory=dict)
    checkpoints: dict[str, CheckpointRecord] = field(default_factory=dict)
    samplers: dict[str, SamplerRecord] = field(default_factory=dict)

    @classmethod
    def of(cls, journal: Journal) -> Holdings:
        return cls(
            sessions={record.id: record for record in journal.records(SessionRecord)},
            models={record.id: record for record in journal.records(ModelRecord)},
            checkpoints={record.id: record for record in journal.records(CheckpointRecord)},
            samplers={record.id: record for record in journal.records(SamplerRecord)},
        )

    def put(self, record: Record) -> Statement:
        """Holds it from now on, in place of an earlier one; what is returned has to be written."""
        match record:
            case SessionRecord():
                self.sessions[record.id] = record
            case ModelRecord():
                self.models[record.id] = record
            case CheckpointRecord():
                self.checkpoints[record.id] = record
            case SamplerRecord():
                self.samplers[record.id] = record
        return put(record)

    def remove(self, record: Record) -> Statement:
        """Also of one that was removed meanwhile."""
        match record:
            case SessionRecord():
                self.sessions.pop(record.id, None)
            case ModelRecord():
                self.models.pop(record.id, None)
            case CheckpointRecord():
                self.checkpoints.pop(record.id, None)
            case SamplerRecord():
                self.samplers.pop(record.id, None)
        return removed(record)

    def session(self, id: str, tenant: str) -> SessionRecord:
        """RequestError with status 410 for one that has ended."""
        found = self.sessions.get(id)
        if found is None or found.tenant != tenant:
            raise not_found(f"session_id {id}: there is no such session of yours.")
        if found.finished:
            raise RequestError(
                f"session_id {id}: this session has ended. Create a client, which begins another.", status=410
            )
        return found

    def model(self, id: str, tenant: str) -> ModelRecord:
        found = self.models.get(id)
        if found is None or found.tenant != tenant:
            raise not_found(f"model_id {id}: there is no such model of yours.")
        return found

    def checkpoint(self, path: str, tenant: str) -> CheckpointRecord:
        found = self.checkpoints.get(path)
        if found is None or found.tenant != tenant or found.hidden:
            raise not_found(f"{path}: there is no such checkpoint of yours. list_user_checkpoints has all of them.")
        return found

    def sampler(self, id: str, tenant: str) -> SamplerRecord:
        found = self.samplers.get(id)
        if found is None or found.tenant != tenant:
            raise not_found(f"sampling_session_id {id}: there is no such sampling session of yours.")
        return found

    def named_checkpoints(self, tenant: str, model: str | None = None) -> list[CheckpointRecord]:
        """The newest first."""
        own = [
            record
            for record in self.checkpoints.values()
            if record.tenant == tenant and not record.hidden and model in (None, record.model)
        ]
        return sorted(own, key=lambda record: (-record.created, record.id))

    def models_of(self, session: str) -> list[ModelRecord]:
        return [record for record in self.models.values() if record.session == session]

    def samplers_of(self, session: str) -> list[SamplerRecord]:
        return [record for record in self.samplers.values() if record.session == session]

    def clear_finished(self) -> list[Statement]:
        """Removes what finished sessions leave behind where the server was killed while it ended them: all but the names of
        their models, and checkpoints with a name. What is returned has to be written."""
        finished = {session.id for session in self.sessions.values() if session.finished}
        models = [model for model in self.models.values() if model.session in finished]
        samplers = [sampler for sampler in self.samplers.values() if sampler.session in finished]
        ended = {model.id for model in models}
        hidden = [record for record in self.checkpoints.values() if record.hidden and record.model in ended]
        loaded = [model for model in models if not model.unloaded or model.state is not None]
        return [
            *(self.put(replace(model, unloaded=True, state=None)) for model in loaded),
            *(self.remove(sampler) for sampler in samplers),
            *(self.remove(checkpoint) for checkpoint in hidden),
            *(forgotten(model.id) for model in models),
            *(forgotten(sampler.id) for sampler in samplers),
        ]

    def require_kind(self, *, whole: bool, folder: Path) -> None:
        """ConfigError if what is kept are adapters and the server trains all weights, or the other way round."""
        specs = [record.spec for record in self.checkpoints.values()]
        specs += [record.spec for record in self.models.values() if not record.unloaded]
        if any((spec.rank is None) != whole for spec in specs):
            there, way = ("LoRA models", "without") if whole else ("models of --full-parameters", "with")
            raise ConfigError(
                f"{folder}: has {there}. Start {way} --full-parameters, or pass --state with another folder."
            )

    def folders(self) -> Iterator[str]:
        """Names of all folders that something refers to."""
        yield from (record.folder for record in self.checkpoints.values())
        yield from (record.state for record in self.models.values() if record.state is not None)
