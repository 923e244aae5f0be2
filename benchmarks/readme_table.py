"""Copies the first table of RESULTS.md into README.md.

    python benchmarks/readme_table.py [--check]

`--check` changes nothing, and ends with exit code 1 if the two differ.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "benchmarks" / "RESULTS.md"
README: Final = ROOT / "README.md"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"


def first_table(results: str) -> str:
    lines = itertools.dropwhile(lambda line: not line.startswith("| what |"), results.splitlines(keepends=True))
    return "".join(itertools.takewhile(lambda line: line.startswith("|"), lines))


def with_table(readme: str, table: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table}{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    readme = README.read_text(encoding="utf-8")
    expected = with_table(readme, first_table(RESULTS.read_text(encoding="utf-8")))
    if asked.check and readme != expected:
        sys.exit("README.md has another table than benchmarks/RESULTS.md: python benchmarks/readme_table.py")
    if not asked.check:
        README.write_text(expected, encoding="utf-8")


if __name__ == "__main__":
    main()
