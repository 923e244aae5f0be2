"""Compare runs: what they reached, and where their configs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Compare runs: what they reached, and where their configs differ.

    "last 10" is the mean of a metric's last ten values. The best value of a row is marked where one direction is better.
    """
    from slime_viewer.comparison_table import print_comparison

    print_comparison(folders, as_json=as_json)
