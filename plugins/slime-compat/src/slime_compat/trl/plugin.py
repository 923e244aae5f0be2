"""The driver of reward `trl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_compat.config import TrlRewardConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.reward import Reward, RewardDriver


class TrlReward(RewardDriver):
    """A reward function of TRL: (prompts, completions, **columns) to a list of numbers."""

    Config = TrlRewardConfig

    @classmethod
    def build(cls, config: TrlRewardConfig) -> Reward:
        from slime_compat.trl.reward import TrlFunctionReward

        return TrlFunctionReward(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            RewardExample(
                options={"path": "slime_compat.written_before.equals_solution"},
                prompt="2+2=",
                metadata={"solution": "4"},
                responses=("4", "5", ""),
                rewards=(1.0, 0.0, 0.0),
            )
        ]
