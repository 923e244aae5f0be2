"""The examples in short form, in a copy: what they make stays out of the sources."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_plugin_kit.warm_slime import WarmSlime

SOURCES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 900.0

Metrics = list[dict[str, Any]]
RunExample = Callable[..., "Ran"]


class Ran:
    """A run that has ended well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        summary = json.loads((folder / "summary.json").read_text())
        self.before: dict[str, float] = summary["eval"]["before"]
        self.after: dict[str, float] = summary["eval"]["after"]

    def metrics(self, axis: str) -> Metrics:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line["metrics"] for line in lines if line["axis"] == axis]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.examples)


@pytest.fixture(scope="session")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All examples, so that those of one task share what is made for it."""
    return shutil.copytree(
        SOURCES, tmp_path_factory.mktemp("copy") / "examples", ignore=shutil.ignore_patterns("generated", "__pycache__")
    )


@pytest.fixture(scope="session")
def run_example(examples: Path, warm: WarmSlime, tmp_path_factory: pytest.TempPathFactory) -> RunExample:
    """`run_example("name", *flags)`: as its README runs it, with flags that make it short."""

    def run(name: str, *flags: str) -> Ran:
        runs = tmp_path_factory.mktemp("runs")
        words = ["run", str(examples / name / "run.toml"), "--runs-dir", str(runs), *flags]
        code, out, err = warm.run(words, runs.parent, timeout_s=TIMEOUT_S)
        assert code == 0, f"{out[-2000:]}\n{err}"
        (folder,) = runs.iterdir()
        return Ran(folder)

    return run
