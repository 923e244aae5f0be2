"""Settings of a router, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProgramName(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds."""

    timeout_s: float = 14400.0
    """For one request as a whole: waiting, attempts and generation."""
    connect_timeout_s: float = 30.0
    """For an upstream that is slow to accept many connections. A port without a listener fails at once."""
    health_interval_s: float = 5.0
    """Time between two health probes of an upstream."""
    health_timeout_s: float = 5.0
    """For one probe, and for one abort request to an upstream."""
    max_in_flight: int = 10_000
    """Further requests get status 503."""
    max_body_bytes: int = 64 * 2**20
    program: ProgramName = ProgramName.SGLANG
    """What the upstreams are."""
    token: str | None = None
    """Bearer token that callers must send. None: no token is required."""
    upstream_token: str | None = None
    """Bearer token that the upstreams require. None: no token is sent."""
