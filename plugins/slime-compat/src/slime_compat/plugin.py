"""Drivers of slime-compat: an old function by its dotted path, as a reward, a generator or a group filter; reward
functions of verl and of TRL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from slime_compat.config import (
    CompatGeneratorConfig,
    CompatRewardConfig,
    OldFunctionConfig,
    TrlRewardConfig,
    VerlRewardConfig,
)
from slime_core.contracts.example import Example, RewardExample
from slime_core.contracts.filter import FilterDriver, GroupFilter
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.reward import Reward, RewardDriver


class CompatReward(RewardDriver):
    """A reward function that was written for THUDM's slime."""

    Config = CompatRewardConfig

    @classmethod
    def build(cls, config: CompatRewardConfig) -> Reward:
        from slime_compat.reward import OldReward

        return OldReward(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        forms: dict[str, bool] = {"reward": False, "rewards_of_group": True}
        return [
            RewardExample(
                options={"path": f"slime_compat.written_before.{name}", "group": group},
                prompt="2+2=",
                label="4",
                responses=("4", "5", ""),
                rewards=(1.0, 0.0, 0.0),
            )
            for name, group in forms.items()
        ]


class CompatGenerator(GeneratorDriver):
    """A generate function that was written for THUDM's slime; its requests to the router go to the run's engines."""

    Config = CompatGeneratorConfig

    @classmethod
    def build(cls, config: CompatGeneratorConfig) -> Generator:
        from slime_compat.generator import OldGenerator

        return OldGenerator(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": "slime_compat.written_before.generate"})]


class CompatFilter(FilterDriver):
    """A dynamic sampling filter that was written for THUDM's slime."""

    Config = OldFunctionConfig

    @classmethod
    def build(cls, config: OldFunctionConfig) -> GroupFilter:
        from slime_compat.group_filter import OldFilter

        return OldFilter(config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [Example(options={"path": "slime_compat.written_before.keep_unequal"})]


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
