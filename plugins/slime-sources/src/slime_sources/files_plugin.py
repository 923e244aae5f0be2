"""Driver of the source `files`. Nothing heavy is imported here."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from slime_core.contracts.example import Example, SourceExample
from slime_core.contracts.source import SourceDriver, SourceFactory
from slime_sources.files_config import FilesConfig


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
