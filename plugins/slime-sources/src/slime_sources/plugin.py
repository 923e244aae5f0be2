"""Drivers of slime-sources, and the decorator that makes a source from a function. Nothing heavy is imported here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.contracts.collector import Collector, CollectorDriver, RolloutOptions
from slime_core.contracts.example import CollectorExample, Example, SourceExample
from slime_core.contracts.media import MediaRenderer
from slime_core.contracts.renderer import RendererDriver, RendererFactory, RenderSettings
from slime_core.contracts.source import SourceDriver, SourceFactory
from slime_core.plugin import driver
from slime_sources.config import CurriculumConfig, FilesConfig, GeneratedConfig, ReplayConfig, StreamConfig, SumsConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime_sources.generated import RowFunction


class Files(SourceDriver):
    """Prompts from .jsonl and .parquet files."""

    Config = FilesConfig

    @classmethod
    def build(cls, config: FilesConfig) -> SourceFactory:
        from slime_sources.files import FilesSource

        return functools.partial(FilesSource, config)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        paths = [folder / "train.jsonl", folder / "more.jsonl", folder / "other.jsonl"]
        for number, path in enumerate(paths):
            rows = [{"input": f"{number}{row}+1=", "label": str(row)} for row in range(5 + number)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        train, more, other = map(str, paths)
        shuffled = {"rollout_shuffle": True}
        return [
            SourceExample(options={"prompt_data": [train]}, other_options={"prompt_data": [other]}),
            SourceExample(
                options={"prompt_data": [f"{train}@[1:]", more], **shuffled},
                label_key="label",
                seeded=True,
                other_options={"prompt_data": [train, more], **shuffled},
            ),
            SourceExample(
                options={
                    "prompt_data": [{"path": train, "weight": 1.0}, {"path": more, "weight": 2.0}],
                    "streaming": True,
                },
                seeded=True,
                epochs=False,
            ),
        ]


class Stream(SourceDriver):
    """Prompts from files that may grow, read row by row."""

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


class Curriculum(SourceDriver):
    """Chooses the difficulty of prompts by observed pass rates: levels that are passed half of the time are drawn most."""

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


def generated_by(cls: type[SourceDriver], row: RowFunction, config: GeneratedConfig) -> SourceFactory:
    from slime_sources.generated import GeneratedSource

    return functools.partial(GeneratedSource, row, config, name=f"{cls.__module__}.{row.__qualname__}")


def prompts(name: str) -> Callable[[RowFunction], type[SourceDriver]]:
    """Names a function `f(number, seed) -> row` as a data source, in a plugin file or for an entry point. A row has the
    form of a line of a data file, and may depend only on the two numbers: a resumed run makes the same rows again.

        @prompts("countdown")
        def countdown(number, seed):
            rng = random.Random(f"{seed}/{number}")
            ...
            return {"input": question, "label": label}
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


class Sums(SourceDriver):
    """Additions, generated as needed: `{"input": "12+5=", "label": "17"}`."""

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


class ChatDriver(RendererDriver):
    """A string or a list of chat messages, with the tokenizer's chat template, to tokens."""

    @classmethod
    def build(cls, config: Any) -> RendererFactory:
        from slime_sources.rendering.prompt_renderer import PromptRenderer

        def made(
            tokenizer: PreTrainedTokenizerBase, settings: RenderSettings, media: MediaRenderer | None
        ) -> PromptRenderer:
            return PromptRenderer(tokenizer, media=media, **asdict(settings))

        return made


class AcceptedDriver(CollectorDriver):
    """Prompts from the buffer, groups judged by the filters in submission order."""

    @classmethod
    def build(cls, config: Any) -> Collector[Any]:
        from slime_sources.accepted import AcceptedGroups

        return AcceptedGroups()


class PoolDriver(CollectorDriver):
    """One pool for the groups of all steps: those that finish first are trained first, the others stay in the pool."""

    across_steps = True

    @classmethod
    def build(cls, config: Any) -> Collector[Any]:
        from slime_sources.pool import GroupPool

        return GroupPool()


class ReplayDriver(CollectorDriver):
    """Steps from a rollout dump; no engine is started."""

    Config = ReplayConfig

    @classmethod
    def build(cls, config: ReplayConfig) -> Collector[Any]:
        from slime_sources.replay import ReplayedGroups

        return ReplayedGroups(Path(config.folder))

    @classmethod
    def needs_engine(cls, config: Any) -> bool:
        return False

    @classmethod
    def problems(cls, config: Any, rollout: RolloutOptions) -> list[str]:
        from slime_core.data.table import dumped_steps

        folder = Path(config.folder)
        if folder.is_dir() and dumped_steps(folder):
            return []
        missing = "it has no step_*.parquet" if folder.is_dir() else "no such folder"
        return [f"rollout dumps of {folder}: {missing}. Set rollouts/ of the folder of a run with --dump-rollouts."]

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_sources.replay_example import write_example

        shape = CollectorExample(options={"folder": str(folder)})
        write_example(
            folder,
            num_steps=shape.num_steps,
            num_groups=shape.rollout_batch_size,
            num_samples=shape.n_samples_per_prompt,
        )
        return [shape]
