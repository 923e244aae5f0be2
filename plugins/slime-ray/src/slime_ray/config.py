"""Options of the Ray launcher."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig


class RayConfig(DriverConfig):
    """Options of the Ray launcher."""

    address: str | None = None
    """Ray cluster to join; by default a private one on this machine."""
    num_cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that Ray reserves for a worker."""
