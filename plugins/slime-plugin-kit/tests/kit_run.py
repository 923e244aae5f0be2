"""Runs the contract kit in a process of its own, and reads what it found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHIPPED = sorted((Path(__file__).parents[3] / "plugins").glob("*/pyproject.toml"))
WITH_A_MODEL = {"slime.backends", "slime.engines"}
ELSEWHERE = {"slime-megatron", "slime-sglang", "slime-verifiers", "slime-vllm"}
"""What starts a server for each property, or imports for seconds, is proven by the tests of its own target."""
REPORT = "report.xml"
OPTIONS = ("-q", "-p", "no:cacheprovider")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}


def shipped(*, with_a_model: bool) -> list[str]:
    """Names of the distributions that have, or have not, a backend or an engine; those that register nothing have no
    contract to keep."""
    projects = [tomllib.loads(path.read_text())["project"] for path in SHIPPED]
    here = [project for project in projects if project["name"] not in ELSEWHERE and "entry-points" in project]
    return [p["name"] for p in here if bool(WITH_A_MODEL & set(p.get("entry-points", {}))) == with_a_model]


@dataclass(frozen=True)
class KitRun:
    code: int
    out: str
    passed: frozenset[str]
    """`losses::masked_tokens_change_nothing[acme-faults/twice]`"""
    failed: Mapping[str, str]
    """By the same names, the text of the failure."""

    def failures_of(self, kind: str, name: str) -> set[str]:
        """Properties that this plugin lacks, whatever its options."""
        return {case.partition("::")[2].partition("[")[0] for case in self.failed if is_of(case, kind, name)}

    def is_sound(self, dist: str) -> bool:
        """Every case of each of its entry points has run, and none has failed."""
        counts = re.findall(
            rf"^slime\S* \S+ \({re.escape(dist)} .*\): (\d+) of (\d+) cases run", self.out, re.MULTILINE
        )
        mine = re.compile(rf"[\[:]{re.escape(dist)}/")
        return bool(counts) and all(ran == all_ for ran, all_ in counts) and not any(map(mine.search, self.failed))

    def num_passed(self, kind: str, name: str) -> int:
        return sum(is_of(case, kind, name) for case in self.passed)


def is_of(case: str, kind: str, name: str) -> bool:
    return case.startswith(f"{kind}::") and (f"/{name}]" in case or f"/{name}-" in case)


def run_kit(folder: Path, *words: str, path: Sequence[Path] = ()) -> KitRun:
    """`pytest WORDS` in `folder`, started, with these folders on the path, as if what they hold were installed."""
    searched = os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={folder / REPORT}", *words]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": searched}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return reported(folder, done.returncode, done.stdout + done.stderr)


class ForkedKit:
    """Runs the kit as `run_kit` does, in forks of one process that has imported what takes seconds."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "out"
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", str(Path(__file__).with_name("kit_fork.py"))]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **ENVIRONMENT}, text=True)

    def __call__(self, folder: Path, *words: str, path: Sequence[Path] = ()) -> KitRun:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = (*OPTIONS, f"--junitxml={folder / REPORT}", *words)
        asked = {"words": words, "folder": str(folder), "path": list(map(str, path)), "out": str(self._out)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return reported(folder, code, self._out.read_text())

    def close(self) -> None:
        self._process.communicate()


def reported(folder: Path, code: int, out: str) -> KitRun:
    report = folder / REPORT
    passed, failed = set(), {}
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            kind = case.get("classname", "").rpartition(".")[2]
            name = f"{kind}::{case.get('name', '').removeprefix('test_')}"
            texts = [f"{bad.get('message')}\n{bad.text}" for tag in ("failure", "error") for bad in case.iter(tag)]
            if texts:
                failed[name] = "\n".join(texts)
            elif case.find("skipped") is None:
                passed.add(name)
        report.unlink()
    return KitRun(code, out, frozenset(passed), failed)


def install(folder: Path, dist: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Metadata that make a distribution of what is on the path: entry points as group to name to target."""
    info = folder / f"{dist.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {dist}\nVersion: 0.1.0\nRequires-Dist: slime-rl>=0.2\n"
    )
    text = [f"[{group}]\n" + "".join(f"{n} = {t}\n" for n, t in names.items()) for group, names in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(text))
