"""`slime` commands as forks of one process that has imported what takes seconds. Each is a process of its own, with its own
folder, words, output and exit code; who tests how a command starts, starts one.

Run as a script, this file is that process: each line of JSON on standard input is a command, and is answered by its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
IMPORTED = (
    "slime_core.buffer.files",
    "slime_core.cli.main",
    "slime_core.cli.training",
    "slime_core.materials",
    "slime_fsdp.plugin",
    "slime_grpo.plugin",
    "slime_local.plugin",
    "slime_rm_math.plugin",
    "torch",
    "transformers.models.auto.auto_factory",
    "transformers.models.qwen3.modeling_qwen3",
)


class WarmSlime:
    def __init__(self, folder: Path) -> None:
        """`folder`: for what the commands print."""
        self._files = {"out": str(folder / "out"), "err": str(folder / "err")}
        pipe = subprocess.PIPE
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=env)

    def run(self, words: Sequence[str], folder: Path) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"words": list(words), "folder": str(folder), **self._files}) + "\n")
        self._process.stdin.flush()
        code = json.loads(self._process.stdout.readline())
        assert code is not None, f"slime {' '.join(words)}: no end within {TIMEOUT_S:g} s"
        return code, Path(self._files["out"]).read_text(), Path(self._files["err"]).read_text()

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def warm_slime(folder: Path) -> Iterator[WarmSlime]:
    warm = WarmSlime(folder)
    try:
        yield warm
    finally:
        warm.close()


def command(words: Sequence[str], folder: str, out: str, err: str) -> None:
    import numpy as np
    import torch

    from slime_core.cli.main import main

    os.setsid()
    os.chdir(folder)
    for path, number in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["slime", *words]
    # What is not seeded differs from process to process.
    random.seed()
    np.random.seed()
    torch.seed()
    main()


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    # Forks share what they do not look at.
    gc.freeze()
    fork: Any = multiprocessing.get_context("fork")
    for line in sys.stdin:
        process = fork.Process(target=command, kwargs=json.loads(line))
        process.start()
        process.join(TIMEOUT_S)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        print(json.dumps(code), flush=True)


# Workers of a run import this file too, under another name.
if __name__ == "__main__":
    serve()
