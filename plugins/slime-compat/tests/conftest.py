"""A folder of modules that were written for upstream slime."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def write_module(tmp_path: Path) -> Iterator[Callable[[str, str], str]]:
    """`write_module(name, code)` puts it into a folder, whose path it returns."""
    names = []

    def write(name: str, code: str) -> str:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return str(tmp_path)

    yield write
    for name in names:
        sys.modules.pop(name, None)
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]
