"""Drivers of slime-sources, and the decorator that makes a source of a function. Nothing heavy is imported here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import Example, SourceExample
from slime_core.contracts.paths import RunPath
from slime_core.contracts.source import SourceDriver, SourceFactory
from slime_core.plugin import driver

RowFunction: TypeAlias = Callable[[int, int], Mapping[str, Any]]


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


class Stream(SourceDriver):
    """Prompts from files that are never read as a whole, and may grow."""

    Config = StreamConfig

    @classmethod
    def build(cls, config: StreamConfig) -> SourceFactory:
        from slime_sources.stream import StreamSource

        return functools.partial(StreamSource, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        one, other = write_rows(folder / "one.jsonl", range(5)), write_rows(folder / "other.jsonl", range(20, 26))
        return [
            SourceExample(options={"prompt_data": one}, other_options={"prompt_data": other}),
            SourceExample(options={"prompt_data": [one, other], "shuffle_rows": 4}, label_key="label", seeded=True),
        ]


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


class Curriculum(SourceDriver):
    """Chooses difficulty by the pass rates that the run observes: what is passed half of the time teaches most."""

    Config = CurriculumConfig

    @classmethod
    def build(cls, config: CurriculumConfig) -> SourceFactory:
        from slime_sources.curriculum import CurriculumSource

        return functools.partial(CurriculumSource, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        easy, hard = write_rows(folder / "easy.jsonl", range(4)), write_rows(folder / "hard.jsonl", range(30, 37))
        levels = [{"path": easy, "name": "easy"}, {"path": hard, "name": "hard"}]
        return [
            SourceExample(
                options={"levels": levels, "rollout_shuffle": True},
                seeded=True,
                epochs=False,
                other_options={"levels": levels[::-1]},
            )
        ]


def write_rows(path: Path, numbers: range) -> str:
    rows = [{"input": f"{number}+1=", "label": str(number + 1)} for number in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class GeneratedConfig(DriverConfig):
    num_rows: int | None = Field(None, gt=0)
    """Rows of an epoch, after which the same ones come again; None: without end."""


def generated_by(cls: type[SourceDriver], row: RowFunction, config: GeneratedConfig) -> SourceFactory:
    from slime_sources.generated import GeneratedSource

    return functools.partial(GeneratedSource, row, config, name=f"{cls.__module__}.{row.__qualname__}")


def prompts(name: str) -> Callable[[RowFunction], type[SourceDriver]]:
    """Names a function `f(number, seed) -> row` as a data source, in a plugin file or for an entry point. A row is what a line
    of a data file would be, and may depend on the two numbers alone: a run that is resumed makes the same rows again.

        @prompts("countdown")
        def countdown(number, seed):
            rng = random.Random(f"{seed}/{number}")
            ...
            return {"input": question, "label": answer}
    """

    def made(function: RowFunction) -> type[SourceDriver]:
        def build(cls: type[SourceDriver], config: GeneratedConfig) -> SourceFactory:
            return generated_by(cls, function, config)

        body: dict[str, Any] = {
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "Config": GeneratedConfig,
            "build": classmethod(build),
        }
        return driver("slime.sources", name)(type(function.__name__, (SourceDriver,), body))

    return made


class SumsConfig(GeneratedConfig):
    digits: int = Field(2, gt=0, le=18)
    """Of each number at most."""
    terms: int = Field(2, ge=2, le=64)
    """Numbers that are added."""


class Sums(SourceDriver):
    """Additions, made up as they are needed: `{"input": "12+5=", "label": "17"}`."""

    Config = SumsConfig

    @classmethod
    def build(cls, config: SumsConfig) -> SourceFactory:
        from slime_sources.sums import row_of

        return generated_by(cls, functools.wraps(row_of)(functools.partial(row_of, config)), config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        return [
            SourceExample(options={"num_rows": 7}, other_options={"num_rows": 7, "digits": 3}),
            SourceExample(options={}, label_key="label", epochs=False),
        ]
