"""Options of the generator `outside_agents`."""

from __future__ import annotations

from pydantic import Field

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath


class OutsideAgentsConfig(DriverConfig):
    host: str = "127.0.0.1"
    """Address to listen on; another than the loopback's lets other machines in, with the token."""
    port: int = Field(8765, ge=0, le=65535)
    """Port to listen on; 0: any free one, for tests."""
    token_file: RunPath
    """File with the bearer token that agents bring; made, readable by its owner alone, if it is not there."""
    lease_s: float = Field(600.0, gt=0)
    """Seconds that an agent has for a prompt; then it is given to another one as well, and who pushes first counts."""
    max_leased: int = Field(4096, gt=0)
    """Prompts in the hands of agents at once; who asks for more is told to wait."""
    max_body_bytes: int = Field(64 * 2**20, ge=1024)
    """Of one request; a larger one is refused before it is read to its end."""
    policy_after_s: float | None = Field(None, ge=0)
    """A prompt that no agent has taken for so long is answered by the policy itself, in one turn. None: it waits."""
    give_labels: bool = False
    """Agents are given the labels too, to compute rewards of their own."""
