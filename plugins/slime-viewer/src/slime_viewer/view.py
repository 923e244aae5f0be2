"""Read rollouts that a run has dumped: a step's groups, one group, or one response."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_viewer.order import Order

app = typer.Typer()


@app.command()
def view(
    folder: Annotated[Path, typer.Argument(help="Of a run with --dump-rollouts, or of step_*.parquet files.")],
    step: Annotated[int | None, typer.Option(help="Which step; without it the last one.")] = None,
    sort: Annotated[
        Order, typer.Option(help="What comes first; spread: groups whose rewards differ most.")
    ] = Order.DRAWN,
    limit: Annotated[int, typer.Option(min=1, help="Groups that are shown.")] = 20,
    group: Annotated[int | None, typer.Option(help="Show one group: its prompt and all responses.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Show one response part by part: the policy version of each part, and what is trained."),
    ] = None,
    hf_checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder whose tokenizer decodes the response; by default that of the run's model."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Read rollouts that a run has dumped: a step's groups, one group, or one response.

    The files are Parquet, one row for each response: pandas and duckdb read them too.
    """
    from slime_viewer.viewing import show

    show(folder, step=step, order=sort, limit=limit, group=group, sample=sample, hf_checkpoint=hf_checkpoint)
