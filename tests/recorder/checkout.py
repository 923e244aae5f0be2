"""Checkout: a source tree with its .venv, whose commands are run in a folder of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

PASSED_ON: Final = ("ATEN_", "LD_LIBRARY_", "MKL_", "ONEDNN_", "TMPDIR")
"""Prefixes of environment variables that are passed to commands; all others are set here or are unset."""
SETTINGS: Final = {
    "COLUMNS": "120",
    "CUDA_VISIBLE_DEVICES": "",
    "LC_ALL": "C.UTF-8",
    "NO_COLOR": "1",
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
}
DISTRIBUTIONS: Final = """
import importlib.metadata, json
found = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
print(json.dumps({name: version for name, version in sorted(found.items()) if name.startswith("slime")}))
"""
REPLACED: Final = (
    (re.compile(r"\bsuch as \d+$|(?<=such as )\d+(?=\")", re.MULTILINE), "<port>"),
    (re.compile(r"[\d.]+ GiB free"), "<number> GiB free"),
    (re.compile(r"\d+ \(at most \d+\)"), "<number> (at most <number>)"),
    (re.compile(r"[\d,]+ tok/s"), "<number> tok/s"),
    (re.compile(r"^ *(\d+ steps), \d+ s *$", re.MULTILINE), r"\1, <seconds> s"),
    (re.compile(r"\b\d+:\d\d:\d\d\b"), "<duration>"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
    (re.compile(r"events\.out\.tfevents\.[\w.-]+"), "<tensorboard's file>"),
)
"""Patterns of text that differs between two runs of the same command."""


@dataclass(frozen=True)
class Ended:
    """What a command left behind, with nothing of this machine in it."""

    words: Sequence[str]
    code: int
    out: str
    err: str

    def text(self) -> str:
        parts = [f"$ {' '.join(self.words)}\nexit code {self.code}\n"]
        parts += [f"---- {name}\n{given}" for name, given in (("stdout", self.out), ("stderr", self.err)) if given]
        return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


@dataclass(frozen=True)
class Checkout:
    root: Path
    work: Path
    """Where commands are run: it has a copy of the examples."""

    @property
    def bin(self) -> Path:
        return self.root / ".venv/bin"

    @property
    def slime(self) -> Path:
        return self.bin / "slime"

    def prepare(self) -> None:
        left_out = shutil.ignore_patterns("generated", "base", "runs", "__pycache__")
        shutil.copytree(self.root / "examples", self.work / "examples", ignore=left_out)
        (self.work / "home").mkdir()

    def scripts(self) -> list[str]:
        """The console scripts of slime's distributions."""
        return sorted(path.name for path in self.bin.iterdir() if path.name.startswith("slime"))

    def run(self, *words: str) -> Ended:
        """The first word is a console script."""
        ended = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.work,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return self.ended(words, ended.returncode, ended.stdout, ended.stderr)

    def ended(self, words: Sequence[str], code: int, out: str, err: str) -> Ended:
        return Ended(words, code, self.plain(out), self.plain(err))

    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return kept | SETTINGS | {"HOME": str(self.work / "home"), "PATH": f"{self.bin}:/usr/bin:/bin"}

    def plain(self, text: str) -> str:
        """Without places, durations and versions."""
        for place, name in ((self.work, "<work>"), (self.root, "<checkout>")):
            text = text.replace(str(place), name)
        for pattern, name in REPLACED:
            text = pattern.sub(name, text)
        return self._version.sub("<version>", text)

    def distributions(self) -> str:
        return "".join(f"{name} {version}\n" for name, version in self._versions.items())

    @cached_property
    def _versions(self) -> dict[str, str]:
        asked = [str(self.bin / "python"), "-c", DISTRIBUTIONS]
        found: dict[str, str] = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
        return found

    @cached_property
    def _version(self) -> re.Pattern[str]:
        versions = "|".join(sorted({re.escape(version) for version in self._versions.values()}))
        return re.compile(rf"(?<![\d.])(?:{versions})(?![\d.]*\d)")
