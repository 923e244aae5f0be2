"""replay: reads steps from a rollout dump, so training can be repeated without an engine."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts.collector import Collector
from slime_core.data.table import dump_file, dumped_steps, read_groups
from slime_core.errors import DataError
from slime_core.rollout.context import RolloutContext
from slime_core.types.sample import SampleGroup


class ReplayedGroups(Collector[RolloutContext]):
    """Reads step N from `step_N.parquet` of the dump, groups and samples in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        path = dump_file(self._folder, step)
        if not path.is_file():
            there = len(dumped_steps(self._folder))
            raise DataError(
                f"{path}: no such dump. {self._folder} has {there} steps. Pass --num-rollout {there}, or replay another dump."
            )
        groups = read_groups(path)
        context.observe(step, groups, [])
        return groups
