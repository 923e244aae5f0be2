"""What the server remembers, as plain data that the journal keeps. Times are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_tinker.models import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """Of one client. Its id ends with a number that counts the tenant's sessions."""

    id: str
    tenant: str
    created: float
    seen: float
    """Of its last heartbeat or request that began something."""
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    id: str
    tenant: str
    session: str
    spec: ModelSpec
    created: float
    seen: float
    user_metadata: dict[str, Any] | None = None
    steps: int = 0
    """Optimizer steps that `state` holds."""
    state: str | None = None
    """Folder with its last saved state, below the models'; None: none was saved."""
    applied: int = 0
    """Last seq_id whose effect `state` holds."""
    unloaded: bool = False
    """Its weights are in no trainer any more."""
    damaged: bool = False
    """An error ended the server while its requests were repeated, so that it is not restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """Saved weights. `id` is the tinker path."""

    id: str
    tenant: str
    model: str
    name: str
    kind: str
    """training or sampler."""
    folder: str
    spec: ModelSpec
    created: float
    size: int
    """Bytes."""
    steps: int
    expires: float | None = None
    user_metadata: dict[str, str] | None = None
    hidden: bool = False
    """Of `save_weights_and_get_sampling_client`: it has no path, and goes with its session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRecord:
    """A sampling session."""

    id: str
    tenant: str
    session: str
    created: float
    checkpoint: str | None = None
    """Id of the checkpoint that it samples from; None: the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request whose result is fetched later. `body` is as it was sent, but decompressed."""

    id: str
    owner: str
    """Model or sampling session."""
    seq: int
    kind: str
    tenant: str
    body: bytes = field(repr=False)
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a future became: protobuf bytes, or JSON."""

    content: bytes = field(repr=False)
    is_proto: bool
    failed: bool = False
