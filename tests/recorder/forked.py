"""Forked: commands of a checkout as forks, which saves the seconds of imports."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from checkout import Checkout, Ended

SCRIPT: Final = Path(__file__).with_name("forks.py")


class Forked:
    """`run` as that of Checkout, as many at a time as there are processes to fork; more wait."""

    def __init__(self, checkout: Checkout, processes: int) -> None:
        self._checkout = checkout
        self._all = [self._start() for _ in range(processes)]
        self._free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        for process in self._all:
            self._free.put(process)

    def run(self, *words: str) -> Ended:
        process = self._free.get()
        try:
            out, err = (self._checkout.work / f"{name}-{process.pid}" for name in ("out", "err"))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps({"words": words, "out": str(out), "err": str(err)}) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            return self._checkout.ended(words, code, out.read_text(), err.read_text())
        finally:
            self._free.put(process)

    def close(self) -> None:
        for process in self._all:
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self._checkout.bin / "python"), str(SCRIPT)],
            cwd=self._checkout.work,
            env=self._checkout.env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def forked(checkout: Checkout, processes: int) -> Iterator[Forked]:
    started = Forked(checkout, processes)
    try:
        yield started
    finally:
        started.close()
