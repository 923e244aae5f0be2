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
    """A .jsonl or .parquet file; `train.jsonl@[100:-50]` takes a range of its rows."""
    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Share of the draws, relative to the other entries; every entry has one, or none has."""

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
    """Files to draw prompts from: a path, or a list of paths and { path, weight }. Without weights they follow each
    other as if they were one file. With weights every draw picks a file, and each file has its own epochs."""
    rollout_shuffle: bool = False
    """Go through the rows in random order, another one each epoch, decided by the seed alone."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row does that is not valid JSON, lacks a key or cannot be rendered: stop the run, or be left out and
    counted."""
    streaming: bool | None = None
    """Check rows when they are drawn (true), or all of them at the start (false), when the length filter also counts
    them. By default at the start, up to 50 000 rows. The draws are the same either way, and rows are read from disk
    when they are drawn in both."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_entries(cls, value: Any) -> Any:
        entries = value if isinstance(value, list | tuple) else [value]
        return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]

    @model_validator(mode="after")
    def _check_weights(self) -> FilesConfig:
        without = [entry.path for entry in self.prompt_data if entry.weight is None]
        if 0 < len(without) < len(self.prompt_data):
            raise ValueError(f"prompt_data: give every entry a weight, or none; without one: {', '.join(without)}")
        return self


class StreamConfig(DriverConfig):
    prompt_data: tuple[RunPath, ...] = Field(min_length=1)
    """.jsonl and .parquet files, read one after the other, in order, a row (of Parquet: a row group) at a time: a path, or a
    list of them. Rows may be appended to the last file, if it is .jsonl, while the run goes on."""
    at_end: Literal["repeat", "end"] = "repeat"
    """When all rows that there are by now have been drawn: begin again with the first file (and whatever was appended since),
    or the data have ended (`rollout.on_exhausted`)."""
    shuffle_rows: int = Field(0, ge=0)
    """Draw at random among the next so many rows, by the seed; 0: in the order of the files. Only their places are kept."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What a row does that is not valid JSON, lacks a key or cannot be rendered: stop the run, or be left out and counted."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class Level(DriverConfig):
    """One difficulty."""

    path: RunPath
    """A .jsonl or .parquet file, or a range of its rows (`train.jsonl@[0:100]`)."""
    name: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """How metrics and the metadata of prompts call it; by default its number, from 0."""


class CurriculumConfig(DriverConfig):
    levels: tuple[Level, ...] = Field(min_length=1)
    """Files of prompts, one for each difficulty, in any order."""
    rollout_shuffle: bool = False
    """Go through each level's rows in random order, another one each epoch."""
    pass_reward: float = Field(1.0, allow_inf_nan=False)
    """A sample with at least this reward passes."""
    memory: int = Field(32, gt=0)
    """Groups over which a level's pass rate is averaged (exponentially, once there were as many)."""
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
            raise ValueError(f"levels: {', '.join(names)}: each needs a name of its own")
        return self

    @property
    def names(self) -> list[str]:
        return [level.name or str(number) for number, level in enumerate(self.levels)]


class GeneratedConfig(DriverConfig):
    num_rows: int | None = Field(None, gt=0)
    """Rows of an epoch, after which the same ones come again; None: without end."""


class SumsConfig(GeneratedConfig):
    digits: int = Field(2, gt=0, le=18)
    """Of each number at most."""
    terms: int = Field(2, ge=2, le=64)
    """Numbers that are added."""


class ReplayConfig(DriverConfig):
    """Where the dump is."""

    folder: RunPath
    """Folder of step_*.parquet files, as a run with --dump-rollouts leaves in its rollouts/."""
