"""Look at runs: a page with curves, rollouts, samples, timeline and health; or their dumped rollouts in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from slime_viewer.order import Order

app = typer.Typer()


@app.command()
def view(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or of step_*.parquet files.")
    ],
    page: Annotated[bool, typer.Option("--page", help="Open the page, also if the output is no terminal.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page; without it a free one.")] = 0,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the page's address only.")] = False,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page with its data into one HTML file.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print rollouts here instead. The options below do that too.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Which step; without it the last one.")] = None,
    sort: Annotated[
        Order | None,
        typer.Option(help="What comes first, drawn by default; spread: groups whose rewards differ most."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Groups that are printed, 20 by default.")] = None,
    group: Annotated[int | None, typer.Option(help="Print one group: its prompt and all responses.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Print one response part by part: the policy version of each part, and what is trained."),
    ] = None,
    hf_checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder whose tokenizer decodes responses; by default that of the run's model."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Look at runs: a page with curves, rollouts, samples, timeline and health.

    The page is served on this machine only, behind the token in its address; a run that goes on is shown live. If the output is
    no terminal, or with --text or an option for it, the rollouts of one run are printed.
    """
    for_text = {
        "--step": step,
        "--sort": sort,
        "--limit": limit,
        "--group": group,
        "--sample": sample,
        "--text": text or None,
    }
    asked = [name for name, value in for_text.items() if value is not None]
    if asked and (page or export):
        raise typer.BadParameter(
            f"{asked[0]} is for the terminal: leave it out, or leave out {'--page' if page else '--export'}."
        )
    if asked or not (page or export or sys.stdout.isatty()):
        if len(folders) > 1:
            raise typer.BadParameter(f"one run can be printed, and there are {len(folders)}. --page shows several.")
        from slime_viewer.viewing import show

        show(
            folders[0],
            step=step,
            order=sort or Order.DRAWN,
            limit=limit or 20,
            group=group,
            sample=sample,
            hf_checkpoint=hf_checkpoint,
        )
        return
    from slime_viewer.page_server import open_page, serve_page

    opened = open_page(folders, hf_checkpoint)
    if export is None:
        serve_page(opened, port=port, browser=not no_browser)
        return
    from slime_viewer.export import write_export

    write_export(opened, export)
    typer.echo(f"written: {export}")
