"""docs/reliability.md: every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def test_every_test_that_it_names_exists() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|plugins)/[^`]*?test_\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 40
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).is_file() or (test and f"def {test}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not missing
