"""Look at runs, on a page in the browser or in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slime_viewer.order import Order

app = typer.Typer()


@app.command()
def view(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Runs, folders of runs or of step_*.parquet.")
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
    """Look at runs, on a page in the browser or in the terminal.

    The page is served on this machine only, behind the token in its address, and follows a run that continues. If the output is
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
    if prints_text(folders, [name for name, value in for_text.items() if value is not None], page, export):
        from slime_viewer.viewing import show

        order = sort or Order.DRAWN
        numbers = {"step": step, "group": group, "sample": sample}
        show(folders[0], order=order, limit=limit or 20, hf_checkpoint=hf_checkpoint, **numbers)
        return
    from slime_viewer.page_server import open_page, serve_page

    with open_page(folders, hf_checkpoint) as opened:
        if export is None:
            serve_page(opened, port=port, browser=not no_browser)
        else:
            from slime_viewer.export import write_export

            write_export(opened, export)
            typer.echo(f"written: {export}")


def prints_text(folders: Sequence[Path], asked: Sequence[str], page: bool, export: Path | None) -> bool:
    """Whether the terminal was asked for; `asked`: the flags for it that were typed. BadParameter if flags contradict."""
    if asked and (page or export):
        other = "--page" if page else "--export"
        raise typer.BadParameter(f"{asked[0]} is for the terminal: leave it out, or leave out {other}.")
    printed = bool(asked) or not (page or export or sys.stdout.isatty())
    if printed and len(folders) > 1:
        raise typer.BadParameter(f"one run can be printed, and there are {len(folders)}. --page shows several.")
    return printed
