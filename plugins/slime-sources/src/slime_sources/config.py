"""Options of slime-sources."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.paths import RunPath
from slime_core.errors import DataError
from slime_sources.data_path import DataPath


class PromptFile(DriverConfig):
    """One entry of prompt_data."""

    path: RunPath
    """A .jsonl or .parquet file; `train.jsonl@[100:-50]` uses a range of its rows."""
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Share of the draws, relative to the other entries; set it for all entries, or for none."""

    @field_validator("path")
    @classmethod
    def _check_slice(cls, path: str) -> str:
        try:
            DataPath.parse(path)
        except DataError as error:
            raise ValueError(str(error)) from error
        return path


class FilesConfig(DriverConfig):
    """Prompts from .jsonl and .parquet files on disk."""

    prompt_data: tuple[PromptFile, ...] = Field(min_length=1)
    """Files to draw prompts from: a path, or a list of paths and { path, weight }. Without weights they are
    read one after the other, as one file. With weights every draw picks a file, and each file has its own epochs."""
    rollout_shuffle: bool = False
    """Shuffle the rows in each epoch, by the seed."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that is not valid JSON, lacks a key or cannot be rendered: stop the run (error), or skip and
    count it (skip)."""
    streaming: bool | None = None
    """Check rows when they are drawn (true), or all of them at the start (false), where the length filter counts them too.
    By default at the start, up to 50 000 rows. The draws are the same in both cases, and rows are read from disk when
    they are drawn."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_entries(cls, value: Any) -> Any:
        entries = value if isinstance(value, list | tuple) else [value]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]

    @model_validator(mode="after")
    def _check_weights(self) -> FilesConfig:
        without = [entry.path for entry in self.prompt_data if entry.weight is None]
        if 0 < len(without) < len(self.prompt_data):
            raise ValueError(f"prompt_data: set weight for all entries, or for none. Without one: {', '.join(without)}")
        return self


class StreamConfig(DriverConfig):
    prompt_data: tuple[RunPath, ...] = Field(min_length=1)
    """.jsonl and .parquet files, read one after the other, in order, a row (of Parquet: a row group) at a time: a path, or a
    list of them. Rows may be appended to the last file, if it is .jsonl, while the run continues."""
    at_end: Literal["repeat", "end"] = "repeat"
    """When all rows have been drawn: start again with the first file, with rows that were appended since (repeat), or end the
    data (end; see `rollout.on_exhausted`)."""
    shuffle_rows: int = Field(0, ge=0)
    """Draw at random among this many next rows, by the seed; 0: in the order of the files. Only their positions are kept."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that is not valid JSON, lacks a key or cannot be rendered: stop the run (error), or skip and
    count it (skip)."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class Level(DriverConfig):
    """One difficulty."""

    path: RunPath
    """A .jsonl or .parquet file, or a range of its rows (`train.jsonl@[0:100]`)."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """Name in metrics and in the metadata of prompts; by default its number, from 0."""


class CurriculumConfig(DriverConfig):
    levels: tuple[Level, ...] = Field(min_length=1)
    """Files of prompts, one for each difficulty, in any order."""
    rollout_shuffle: bool = False
    """Shuffle the rows of each level in each epoch, by the seed."""
    pass_reward: float = Field(1.0, allow_inf_nan=False)
    """A sample with at least this reward passes."""
    memory: int = Field(32, gt=0)
    """Groups over which a level's pass rate is averaged (a plain mean up to this many, then exponential)."""
    least_share: float = Field(0.05, gt=0, le=1)
    """Weight of a level that is always or never passed, relative to one that is passed half of the time."""

    @field_validator("levels", mode="before")
    @classmethod
    def _as_levels(cls, value: Any) -> Any:
        entries = value if isinstance(value, list | tuple) else [value]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]

    @model_validator(mode="after")
    def _names_differ(self) -> CurriculumConfig:
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(f"levels: {', '.join(names)}: each level must have its own name")
        return self

    @property
    def names(self) -> list[str]:
        return [level.name or str(number) for number, level in enumerate(self.levels)]


class GeneratedConfig(DriverConfig):
    num_rows: int | None = Field(None, gt=0)
    """Rows of an epoch, after which they repeat; None: no end."""


class SumsConfig(GeneratedConfig):
    digits: int = Field(2, gt=0, le=18)
    """Largest number of digits of each number."""
    terms: int = Field(2, ge=2, le=64)
    """Count of the numbers that are added."""


class ReplayConfig(DriverConfig):
    """Options of the collector replay."""

    folder: RunPath
    """Folder of step_*.parquet files: rollouts/ of a run with --dump-rollouts."""
