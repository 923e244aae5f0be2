"""Settings of a router, fixed when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Times in seconds."""

    timeout_s: float = 14400.0
    """For one request as a whole: waiting, attempts and generation."""
    connect_timeout_s: float = 30.0
    """Where nobody listens, that shows at once; this is for an upstream that is slow to accept many callers."""
    health_interval_s: float = 5.0
    """Between two probes of an upstream."""
    health_timeout_s: float = 5.0
    """For one probe, and for telling an upstream to abort."""
    max_in_flight: int = 10_000
    """Requests beyond this are turned away with status 503."""
    max_body_bytes: int = 64 * 2**20
    token: str | None = None
    """What callers must bring; None: nothing."""
    upstream_token: str | None = None
    """What the upstreams want."""
