"""Checkpoints: folders of saved weights, by their tinker path. What nothing refers to is deleted."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from slime_core.atomic_io.atomic_file import sync
from slime_core.atomic_io.storage import written
from slime_core.errors import StorageError
from slime_tinker.errors import RequestError
from slime_tinker.holdings import Holdings
from slime_tinker.journal import Journal, Statement
from slime_tinker.records import CheckpointRecord, ModelRecord
from slime_tinker.sampler_weights import OpenWeights

NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
SEGMENTS: Final = {"training": "weights", "sampler": "sampler_weights"}
MIN_TTL_S: Final = 3600
MAX_TTL_S: Final = 10 * 365 * 24 * 3600


@dataclass(slots=True)
class Checkpoints:
    root: Path
    """Of all folders."""
    holdings: Holdings
    journal: Journal
    open_weights: OpenWeights
    max_per_tenant: int
    needed: dict[str, set[str]] = field(default_factory=dict)
    """By model, the paths of checkpoints that a restart would load into it again, since its own state is not saved yet."""

    def new_folder(self) -> str:
        """A name that none has; the folder itself is not there yet."""
        self.root.mkdir(parents=True, exist_ok=True)
        return uuid.uuid4().hex

    def folder_of(self, name: str) -> Path:
        return self.root / name

    async def clear_orphans(self) -> None:
        """Deletes what a server left that was killed while it saved."""
        known = set(self.holdings.folders())
        orphans = [path for path in self.root.iterdir() if path.name not in known] if self.root.is_dir() else []
        for path in orphans:
            await asyncio.to_thread(shutil.rmtree, path, True)

    def path_of(self, model: ModelRecord, kind: str, name: str, *, overwrite: bool = False) -> str:
        """RequestError for a name that no folder of a URI may have, one that is in use, or one too many."""
        if not NAME.fullmatch(name):
            raise RequestError(
                f'path "{name}": must be letters, digits, ".", "_" and "-", at most 200, and begin with none of ".": it is the '
                "last part of the checkpoint's path."
            )
        path = f"tinker://{model.id}/{SEGMENTS[kind]}/{name}"
        if path in self.holdings.checkpoints and not overwrite:
            raise RequestError(f'path "{name}": {path} is there already. Pass another name, or overwrite=True.')
        if overwrite:
            self.require_unneeded(path)
        number = len(self.holdings.named_checkpoints(model.tenant))
        if path not in self.holdings.checkpoints and number >= self.max_per_tenant:
            raise RequestError(f'path "{name}": you have {number} checkpoints, the most there may be. Delete some.')
        return path

    def put(self, record: CheckpointRecord) -> tuple[Statement, str | None]:
        """What puts `record` in place of one of the same path, and that one's folder, to be deleted once this is written."""
        earlier = self.holdings.checkpoints.get(record.id)
        return self.holdings.put(record), None if earlier is None else earlier.folder

    async def delete(self, record: CheckpointRecord, *, lasting: bool = True) -> None:
        """Nothing if it was deleted or replaced since it was looked up. Not `lasting`: StorageError if that cannot be written
        now, and it stays."""
        if self.holdings.checkpoints.get(record.id) is not record:
            return
        try:
            await self.journal.write([self.holdings.remove(record)], lasting=lasting)
        except StorageError:
            self.holdings.put(record)
            raise
        await self.delete_folder(record.folder)

    def need(self, model: str, path: str) -> bool:
        """A restart of the model may load it. False: it was needed before."""
        paths = self.needed.setdefault(model, set())
        is_new = path not in paths
        paths.add(path)
        return is_new

    def _is_needed(self, path: str) -> bool:
        return any(path in paths for paths in self.needed.values())

    def require_unneeded(self, path: str) -> None:
        """RequestError with a status after which the SDK sends again."""
        model = next((model for model, paths in self.needed.items() if path in paths), None)
        if model is not None:
            raise RequestError(
                f"{path}: {model} has loaded it, and the server has not saved that model since. Try again later.",
                status=409,
            )

    async def set_ttl(self, record: CheckpointRecord, ttl_s: int | None) -> None:
        await self.journal.write([self.holdings.put(replace(record, expires=expiry(ttl_s)))])

    async def delete_expired(self) -> None:
        now = time.time()
        for record in list(self.holdings.checkpoints.values()):
            if record.expires is not None and record.expires <= now and not self._is_needed(record.id):
                await self.delete(record)

    async def delete_snapshots(self, model: str, *, keep: int) -> None:
        """All but the newest `keep` that have no name."""
        own = [record for record in self.holdings.checkpoints.values() if record.hidden and record.model == model]
        for record in sorted(own, key=lambda record: record.created, reverse=True)[keep:]:
            await self.delete(record)

    async def delete_folder(self, name: str) -> None:
        await self.open_weights.forget(self.folder_of(name))
        await asyncio.to_thread(shutil.rmtree, self.folder_of(name), True)


def expiry(ttl_s: int | None) -> float | None:
    if ttl_s is None:
        return None
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise RequestError(f"ttl_seconds = {ttl_s}: must be from {MIN_TTL_S} to {MAX_TTL_S}, or None for ever.")
    return time.time() + ttl_s


def stored(folder: Path, write: Callable[[], None]) -> int:
    """Writes a folder that is whole after a power failure, and returns its bytes. StorageError: it is not there."""
    size, done = 0, False
    try:
        with written(folder):
            write()
            for path in sorted(folder.rglob("*")):
                size += path.stat().st_size if path.is_file() else 0
                sync(path)
            sync(folder)
            sync(folder.parent)
        done = True
    finally:
        if not done:
            shutil.rmtree(folder, ignore_errors=True)
    return size


def shown(record: CheckpointRecord) -> dict[str, Any]:
    """As the SDK lists it."""
    return {
        "checkpoint_id": f"{SEGMENTS[record.kind]}/{record.name}",
        "checkpoint_type": record.kind,
        "time": iso(record.created),
        "tinker_path": record.id,
        "size_bytes": record.size,
        "public": False,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires is None else iso(record.expires),
    }


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
