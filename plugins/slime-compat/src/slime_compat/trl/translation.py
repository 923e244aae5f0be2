"""TrlTranslation: what the rules for TRL share."""

from __future__ import annotations

from dataclasses import dataclass

from slime_compat.peer import PeerTranslation
from slime_compat.trl.script import TrlScript


@dataclass(slots=True, kw_only=True)
class TrlTranslation(PeerTranslation):
    script: TrlScript
    num_processes: int = 1
    """Processes of the trainer, as accelerate launch counts them."""
    knows_processes: bool = False
    """Whether the command line names them."""
    steps_per_rollout: int = 1
    """Optimizer steps for each batch of completions."""

    def rollout_steps(self, keyword: str, steps: int) -> int:
        """Optimizer steps in rollout steps, with a note if they are no whole number of these."""
        if steps % self.steps_per_rollout:
            self.note(keyword, f"{steps}: in rollout steps of {self.steps_per_rollout} optimizer steps, rounded up")
        return -(-steps // self.steps_per_rollout)
