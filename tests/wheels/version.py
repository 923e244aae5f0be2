"""Sets the version of every distribution: `make version V=0.2.1`.

The one place that decides it is `slime_core.__version__`; tests/unit/test_version.py holds the others to it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KERNEL: Final = ROOT / "slime_core" / "__init__.py"


def projects() -> list[Path]:
    return [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]


def requirement(version: str) -> str:
    """What a distribution of this version requires of the others: the same minor release."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"


def set_version(version: str) -> None:
    KERNEL.write_text(
        re.sub(r'^__version__ = ".*"$', f'__version__ = "{version}"', KERNEL.read_text(), flags=re.MULTILINE)
    )
    for path in projects():
        text = re.sub(r'^version = ".*"$', f'version = "{version}"', path.read_text(), count=1, flags=re.MULTILINE)
        path.write_text(
            re.sub(r'("slime-[a-z0-9-]+(?:\[[a-z,]+\])?)>=[^";]*(["; ])', rf"\g<1>{requirement(version)}\2", text)
        )


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", sys.argv[1]):
        sys.exit("pass a version: make version V=0.2.1")
    set_version(sys.argv[1])
