"""Options of the generator `external_agents`."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class ExternalAgentsConfig(DriverConfig):
    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach an address that is not the loopback's, and need the token."""
    port: int = Field(8765, ge=0, le=65535)
    """Port to listen on; 0: any free one, for tests."""
    token_file: RunPath
    """File with the bearer token that agents send; created, readable by its owner only, if it does not exist."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds that an agent has for a prompt; then another agent can get it as well, and the first response counts."""
    max_leased: int = Field(4096, gt=0)
    """Maximum number of prompts that agents hold at the same time; a request for more gets status 429."""
    max_body_bytes: int = Field(64 * 2**20, ge=1024)
    """Maximum size of a request's body; a larger one is refused before it is read to its end."""
    policy_after_s: float | None = Field(None, ge=0)
    """Seconds after which the policy itself responds, in one turn, to a prompt that no agent fetched. None: it waits."""
    give_labels: bool = False
    """Send the labels to agents too, to compute rewards of their own."""
