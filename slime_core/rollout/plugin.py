"""The kernel's own generator and collectors, registered like anyone else's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.contracts.collector import Collector, CollectorDriver
from slime_core.contracts.driver import DriverConfig
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
    def build(cls, config: Any) -> Collector:
        from slime_core.rollout.accepted import AcceptedGroups

        return AcceptedGroups()


class ReplayConfig(DriverConfig):
    """Where the dump is."""

    folder: RunPath
    """Folder of step_*.parquet files, as a run with --dump-rollouts leaves in its rollouts/."""


class ReplayDriver(CollectorDriver):
    """Steps from a rollout dump; no engine is started."""

    Config = ReplayConfig

    @classmethod
    def build(cls, config: ReplayConfig) -> Collector:
        from slime_core.rollout.replay import ReplayedGroups

        return ReplayedGroups(Path(config.folder))

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        return False
