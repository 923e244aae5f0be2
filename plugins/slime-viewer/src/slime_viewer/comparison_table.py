"""What `slime compare` prints."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slime_viewer.comparison import compare, compare_page
from slime_viewer.run_list import RunList

PIPED_WIDTH: Final = 160
FORMATS: Final[Mapping[str, str]] = {"share": "{:.1%}", "seconds": "{:,.2f} s", "count": "{:,.0f}", "number": "{:.4g}"}


def print_comparison(folders: Sequence[Path], *, as_json: bool) -> None:
    """ConfigError for a folder that is not there."""
    runs = list(RunList(folders))
    if as_json:
        typer.echo(json.dumps(compare_page(runs), indent=1))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(Text(run.id), justify="right", overflow="fold")
    section = ""
    for row in compare(runs):
        if row.section != section:
            section = row.section
            table.add_row(Text(section, style="bold"))
        best = row.best()
        cells = [
            Text(cell(value, row.kind), style="bold" if place in best else "") for place, value in enumerate(row.values)
        ]
        marked = [Text.assemble(text, " *" if place in best else "  ") for place, text in enumerate(cells)]
        table.add_row(Text(f"  {row.name}"), *marked)
    on_terminal = sys.stdout.isatty()
    console = Console(highlight=False, soft_wrap=not on_terminal, width=None if on_terminal else PIPED_WIDTH)
    console.print(table)
    console.print("* the best of its row")


def cell(value: float | str | None, kind: str) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return value if isinstance(value, str) else FORMATS.get(kind, "{}").format(value)
