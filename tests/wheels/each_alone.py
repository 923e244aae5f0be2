"""Installs each wheel into an empty virtual environment of its own, with the requirements of its metadata, and tests it there.

make test-wheels                     # its package imports, and `slime plugins` lists what it registers
make dist-check                      # its own tests, with its extra `testing`
make dist-check FLAGS=slime-grpo     # of one distribution
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
UV: Final = str(Path(sys.executable).with_name("uv"))
MARKERS: Final = "not examples and not faults and not gpu and not megatron and not mooncake and not runs and not sglang"


@dataclass(frozen=True)
class Distribution:
    name: str
    folder: Path
    entries: frozenset[tuple[str, str]]
    """(group, name) of the plugins that it registers."""

    @property
    def package(self) -> str:
        return "slime_core" if self.folder == ROOT else self.name.replace("-", "_")


def distributions() -> Iterator[Distribution]:
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        groups = project.get("entry-points", {}).items()
        entries = {(group, name) for group, names in groups if group.split(".")[0] == "slime" for name in names}
        yield Distribution(project["name"], path.parent, frozenset(entries))


def run(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, env=env, cwd="/")


def build(found: Sequence[Distribution], folder: Path) -> None:
    for one in found:
        built = run(UV, "build", "--wheel", "--quiet", "--no-build-isolation", "--python", sys.executable,
                    "--out-dir", folder, one.folder)  # fmt: skip
        if built.returncode:
            sys.exit(f"{one.name} cannot be built:\n{built.stdout}{built.stderr}")


def install(one: Distribution, wheels: Path, folder: Path, extra: str = "") -> str:
    """What went wrong; empty if nothing did."""
    made = run(UV, "venv", "--quiet", "--python", sys.executable, folder)
    if made.returncode:
        return made.stderr
    expected = f"{one.name}[{extra}]" if extra else one.name
    # The flag takes the place of the variable.
    places = [str(wheels), *os.environ.get("UV_FIND_LINKS", "").split()]
    links = [word for place in places for word in ("--find-links", place)]
    done = run(UV, "pip", "install", "--quiet", "--python", folder / "bin/python", *links,
               "--constraint", ROOT / "constraints.txt", expected)  # fmt: skip
    return done.stderr if done.returncode else ""


def look(one: Distribution, folder: Path) -> str:
    """Imports the package, and compares `slime plugins` with what the project registers."""
    imported = run(folder / "bin/python", "-c", f"import {one.package}")
    if imported.returncode:
        return imported.stderr
    listed = run(folder / "bin/slime", "plugins", "--json")
    if listed.returncode:
        return listed.stderr
    ours = {(row["group"], row["name"]) for row in json.loads(listed.stdout) if row["dist"] == one.name}
    bad = [row for row in json.loads(listed.stdout) if row["dist"] == one.name and row["status"] != "ok"]
    if missing := one.entries - ours:
        return f"`slime plugins` does not list {sorted(missing)}"
    return f"`slime plugins` lists {bad}" if bad else ""


def own_tests(one: Distribution, folder: Path) -> str:
    tests = one.folder / "tests" if one.folder != ROOT else ROOT / "tests/unit"
    if not any(tests.glob("**/test_*.py")):
        return ""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    tested = run(folder / "bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
                 "--rootdir", ROOT, "-m", MARKERS, tests, env=env)  # fmt: skip
    # 5: all of its tests are those of another target.
    return "" if tested.returncode in (0, 5) else tested.stdout[-4000:] + tested.stderr[-2000:]


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--tests", action="store_true", help="run each distribution's own tests, too")
    words.add_argument("names", nargs="*", help="distributions; by default all")
    asked = words.parse_args()
    found = list(distributions())
    failed = 0
    chosen = [one for one in found if not asked.names or one.name in asked.names]
    with tempfile.TemporaryDirectory(dir=ROOT / ".venv") as temporary:
        wheels = Path(temporary) / "wheels"
        build(found, wheels)
        for one in chosen:
            folder = Path(temporary) / one.name
            # The kernel's unit tests bind run files that name shipped plugins.
            testing = "all,testing" if one.folder == ROOT else "testing"
            problem = install(one, wheels, folder, testing if asked.tests else "") or look(one, folder)
            if asked.tests and not problem:
                problem = own_tests(one, folder)
            print(f"{'FAILED' if problem else 'ok':6} {one.name}", flush=True)
            if problem:
                failed += 1
                print(problem)
            run("rm", "-rf", folder)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
