"""Options of the source `files`."""

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
