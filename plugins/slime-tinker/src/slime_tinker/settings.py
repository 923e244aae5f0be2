"""Settings of a server, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """For each tenant, except what is for one request."""

    max_body_bytes: int = 64 * 2**20
    """Of a request, decompressed."""
    max_tokens: int = 1_000_000
    """In the datums of one forward_backward."""
    max_models: int = 8
    """Models in the trainers."""
    max_pending: int = 5_000
    """Requests without a result. More get status 429, after which the SDK waits and sends again."""
    max_pending_bytes: int = 2**30
    """Of these requests, which wait in memory; with as many or more, the next gets status 429."""
    max_metadata_bytes: int = 2**16
    """user_metadata of a session, model or checkpoint, which are kept for as long as the folder."""
    max_samples: int = 1_024
    """num_samples of a request."""
    max_checkpoints: int = 1_000
    max_snapshots: int = 16
    """Of each model, weights for sampling that have no name; the oldest are deleted."""
    max_whole_snapshots: int = 4
    """The same of a model that trains all weights: each of them is a whole model on the disk."""

    def snapshots(self, *, whole: bool) -> int:
        return self.max_whole_snapshots if whole else self.max_snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How long what clients left behind is kept. Seconds."""

    session_s: float = 600.0
    """A session without heartbeat for so long has ended: its models leave the trainers, and everything of theirs that was not
    saved under a name is deleted."""
    result_s: float = 3600.0
    """Results, after they are there."""
    gap_s: float = 600.0
    """A request whose predecessor has not arrived for so long no longer waits for it. The SDK gives up after 300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    state: Path
    """Folder of everything that outlives the server."""
    poll_s: float = 20.0
    """How long a fetch waits before the client has to try again; the SDK's own limit is 45."""
    sampling_places: int = 512
    """Sequences sampled at a time."""
    limits: Limits = field(default_factory=Limits)
    retention: Retention = field(default_factory=Retention)
    save_after_s: float = 20.0
    """Seconds of training that a restart may have to repeat, about; a model is saved at most as often as ten times the
    duration of its last saving, too."""
