"""Strangers' distributions, built as wheels and installed into folders of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCES = Path(__file__).parent / "third_party"


@dataclass(frozen=True)
class Installed:
    """Folders to put on PYTHONPATH, as if these distributions were installed beside slime."""

    folders: tuple[Path, ...]

    def env(self, **variables: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.folders)), **variables}

    def python(self, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self._run([sys.executable, "-c", code, *arguments], variables)

    def slime(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The `slime` command, with these distributions."""
        return self._run([sys.executable, "-c", "from slime_core.cli.main import main; main()", *words], variables)

    def _run(self, command: Sequence[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env(**variables), capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def install_third_party(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Installed]:
    """`install_third_party("acme-slime", ...)`: builds each source folder of third_party/ into a wheel, once, and
    installs it. No index is asked: hatchling is here already, and dependencies are not installed."""
    folders: dict[str, Path] = {}

    def install(*names: str) -> Installed:
        for name in names:
            if name not in folders:
                folders[name] = build_and_install(SOURCES / name, tmp_path_factory.mktemp(name))
        return Installed(tuple(folders[name] for name in names))

    return install


def build_and_install(source: Path, work: Path) -> Path:
    # A copy, so that the build leaves nothing in the checkout.
    copy = shutil.copytree(source, work / "source", ignore=shutil.ignore_patterns("__pycache__"))
    wheels, target = work / "wheels", work / "site"
    wheels.mkdir()
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=copy, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    options = ["--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([*installer(), *options], check=True, capture_output=True)
    return target


def installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    uv = shutil.which("uv")
    assert uv is not None, "neither pip nor uv is there to install a wheel"
    return [uv, "pip", "install"]
