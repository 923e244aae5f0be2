"""Drivers of slime-compat: an old function by its dotted path, as a reward, a generator or a group filter; and old dumps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_compat.config import CompatDumpConfig, CompatGeneratorConfig, CompatRewardConfig, OldFunctionConfig
from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.example import CollectorExample, Example, RewardExample
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


class CompatDump(CollectorDriver):
    """Steps from dumps of THUDM's slime (`--save-debug-rollout-data`); no engine is started."""

    Config = CompatDumpConfig

    @classmethod
    def build(cls, config: CompatDumpConfig) -> Collector[Any]:
        from slime_compat.rollout_dump import DumpedGroups

        return DumpedGroups(config)

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        return False

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_compat.written_dump import write_example

        shape = CollectorExample(options={"path": str(folder / "{rollout_id}.pt")})
        write_example(folder, shape.num_steps, shape.rollout_batch_size, shape.n_samples_per_prompt)
        return [shape]
