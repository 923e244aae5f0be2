"""replay: steps come from a rollout dump, so training can be repeated without an engine."""

from __future__ import annotations

from pathlib import Path

from slime_core.contracts.collector import Collector
from slime_core.data.table import read_groups
from slime_core.errors import DataError
from slime_core.rollout.context import RolloutContext
from slime_core.types.sample import SampleGroup


def dump_file(folder: Path, step: int) -> Path:
    """Where the groups of a step are dumped."""
    return folder / f"step_{step:06d}.parquet"


def dumped_steps(folder: Path) -> list[int]:
    """In order."""
    numbers = (path.stem.removeprefix("step_") for path in folder.glob("step_*.parquet"))
    return sorted(int(number) for number in numbers if number.isdigit())


class ReplayedGroups(Collector[RolloutContext]):
    """Reads step N from `step_N.parquet` of the dump, groups and samples in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def collect(self, step: int, context: RolloutContext) -> list[SampleGroup]:
        path = dump_file(self._folder, step)
        if not path.is_file():
            there = len(dumped_steps(self._folder))
            raise DataError(
                f"{path}: no such dump; {self._folder} holds {there} steps. Say --num-rollout {there}, or replay another."
            )
        groups = read_groups(path)
        context.observe(step, groups, [])
        return groups
