"""The driver of reward `verl`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from slime_compat.config import VerlRewardConfig
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.reward import Reward, RewardDriver


class VerlReward(RewardDriver):
    """A reward function of verl: (data_source, solution_str, ground_truth, extra_info) to a number, or a dict with `score`."""

    Config = VerlRewardConfig
    reward_key: ClassVar[str | None] = "score"

    @classmethod
    def build(cls, config: VerlRewardConfig) -> Reward:
        from slime_compat.verl.reward import VerlFunctionReward

        return VerlFunctionReward(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        file = folder / "score.py"
        file.write_text(
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None, right=1.0):\n"
            "    return right * (solution_str == ground_truth)\n"
        )
        return [
            RewardExample(
                options={"path": str(file), "reward_kwargs": {"right": 2.0}},
                prompt="2+2=",
                metadata={"data_source": "sums", "reward_model": {"ground_truth": "4"}},
                responses=("4", "5", ""),
                rewards=(2.0, 0.0, 0.0),
            )
        ]
