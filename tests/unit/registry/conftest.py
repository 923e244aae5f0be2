"""Made-up installed distributions: metadata folders and modules in a temporary site folder on sys.path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest


@dataclass(frozen=True)
class Site:
    folder: Path

    def add(
        self,
        dist: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        *,
        version: str = "0.1.0",
        requires: str | None = "slime-rl>=0.2,<0.3",
    ) -> Path:
        """Installs it: `entry_points` is group to name to target, `modules` is module to source. Returns the metadata
        folder."""
        info = self.folder / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n"
        if requires is not None:
            metadata += f"Requires-Dist: {requires}\n"
        (info / "METADATA").write_text(metadata)
        self.write_entry_points(info, entry_points)
        for module, source in (modules or {}).items():
            (self.folder / f"{module}.py").write_text(dedent(source))
        importlib.invalidate_caches()
        return info

    @staticmethod
    def write_entry_points(info: Path, entry_points: Mapping[str, Mapping[str, str]]) -> None:
        text = "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in names.items()) + "\n"
            for group, names in entry_points.items()
        )
        (info / "entry_points.txt").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        module_file = getattr(sys.modules[name], "__file__", None) or ""
        if module_file.startswith(str(tmp_path)) or name.startswith("slime_plugin_"):
            del sys.modules[name]
