"""The kernel's own generator and collectors, registered like anyone else's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import CollectorExample, Example
from slime_core.contracts.generator import Generator, GeneratorDriver
from slime_core.contracts.paths import RunPath


class SingleTurnDriver(GeneratorDriver):
    """One engine call per answer."""

    @classmethod
    def build(cls, config: Any) -> Generator:
        from slime_core.rollout.single_turn import SingleTurn

        return SingleTurn()


class AcceptedDriver(CollectorDriver):
    """Prompts from the buffer, groups judged by the filters in submission order."""

    @classmethod
    def build(cls, config: Any) -> Collector[Any]:
        from slime_core.rollout.accepted import AcceptedGroups

        return AcceptedGroups()


class PoolDriver(CollectorDriver):
    """Groups of all steps in one pool: those that finish first are trained first, what is left over goes on."""

    across_steps = True

    @classmethod
    def build(cls, config: Any) -> Collector[Any]:
        from slime_core.rollout.pool import GroupPool

        return GroupPool()


class ReplayConfig(DriverConfig):
    """Where the dump is."""

    folder: RunPath
    """Folder of step_*.parquet files, as a run with --dump-rollouts leaves in its rollouts/."""


class ReplayDriver(CollectorDriver):
    """Steps from a rollout dump; no engine is started."""

    Config = ReplayConfig

    @classmethod
    def build(cls, config: ReplayConfig) -> Collector[Any]:
        from slime_core.rollout.replay import ReplayedGroups

        return ReplayedGroups(Path(config.folder))

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        return False

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_core.rollout.replay_example import write_example

        shape = CollectorExample(options={"folder": str(folder)})
        write_example(
            folder,
            num_steps=shape.num_steps,
            num_groups=shape.rollout_batch_size,
            num_samples=shape.n_samples_per_prompt,
        )
        return [shape]
