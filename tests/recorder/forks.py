"""Console scripts as forks of one process that has imported what takes seconds. Run by the Python of a checkout: each line of
JSON on standard input is a command, and is served by its exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import sys
from typing import Any, Final

IMPORTED: Final = (
    "numpy",
    "pyarrow.parquet",
    "pydantic",
    "rich.progress",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "typer",
)
"""Of other projects: where slime's own modules are may change."""


def command(words: list[str], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=words[0])
    sys.argv = words
    sys.exit(script.load()())


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    fork: Any = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = fork.Process(target=command, kwargs=json.loads(line))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


# Workers of a command import this file too, under another name.
if __name__ == "__main__":
    serve()
