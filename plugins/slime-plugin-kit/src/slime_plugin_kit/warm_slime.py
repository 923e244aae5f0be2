"""`slime` commands as forks of one process that has imported what takes seconds. Each is a process of its own, with its own
folder, words, output and exit code. Tests of the start of a command start a process instead.

Run with names of modules, this module is that process, and imports them: each line of JSON on standard input is a
command, and is served by two lines, the fork's pid and, when it has ended, its exit code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0


class WarmSlime:
    """One command at a time."""

    def __init__(self, folder: Path, modules: Sequence[str]) -> None:
        """`folder`: for what the commands print. `modules`: what takes seconds to import."""
        self._files = {"out": str(folder / "out"), "err": str(folder / "err")}
        pipe = subprocess.PIPE
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        # Unbuffered: `select` on the pipe shows whether there is a line.
        command = [sys.executable, "-P", "-m", __name__, *modules]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)
        self._last: Forked | None = None

    def start(self, words: Sequence[str], folder: Path, *, timeout_s: float = TIMEOUT_S) -> Forked:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        given = {"words": list(words), "folder": str(folder), **self._files}
        request = {"command": given, "timeout_s": timeout_s}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._last = Forked(words, int(self._process.stdout.readline()), self._process.stdout, Path(self._files["err"]))
        return self._last

    def run(self, words: Sequence[str], folder: Path, *, timeout_s: float = TIMEOUT_S) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        code = self.start(words, folder, timeout_s=timeout_s).wait()
        return code, Path(self._files["out"]).read_text(), Path(self._files["err"]).read_text()

    def close(self) -> None:
        if self._last is not None:
            self._last.kill()
        self._process.communicate()


class Forked:
    """A command under way."""

    def __init__(self, words: Sequence[str], pid: int, exit_codes: Any, err: Path) -> None:
        self._words = list(words)
        self._pid = pid
        self._exit_codes = exit_codes
        self._err = err
        self._code: int | None = None

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code, negative for a signal. subprocess.TimeoutExpired if it has not ended by then."""
        if self._code is None:
            if timeout_s is not None and not select.select([self._exit_codes], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(self._words, timeout_s)
            code = json.loads(self._exit_codes.readline())
            assert code is not None, f"slime {' '.join(self._words)}: no end within its time limit"
            self._code = int(code)
        return self._code

    def has_ended(self) -> bool:
        try:
            self.wait(0.001)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Sends SIGKILL to this process alone; does nothing if it has ended."""
        if self._code is None:
            # It may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self.wait()


@contextlib.contextmanager
def warm_slime(folder: Path, modules: Sequence[str]) -> Iterator[WarmSlime]:
    warm = WarmSlime(folder, modules)
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


def serve(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    # Forks share what they do not look at.
    gc.freeze()
    fork: Any = multiprocessing.get_context("fork")
    for line in sys.stdin:
        request = json.loads(line)
        process = fork.Process(target=command, kwargs=request["command"])
        process.start()
        print(process.pid, flush=True)
        process.join(request["timeout_s"])
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        print(json.dumps(code), flush=True)
    # Without the interpreter's end, at which triton reports every frozen object as leaked.
    sys.stdout.flush()
    os._exit(0)


# Workers of a run import this module too, under another name.
if __name__ == "__main__":
    serve(sys.argv[1:])
