"""Look at Python, packages, devices, Ray, plugins, engines, ports, files and disks. The exit code is 1 if one is bad."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine_python: Annotated[
        list[str] | None,
        typer.Option(help="An interpreter that starts servers of engines (--vllm-python). May be given several times."),
    ] = None,
) -> None:
    """Look at Python, packages, devices, Ray, plugins, engines, ports, files and disks. The exit code is 1 if one is bad."""
    from slime_core.registry import Registry
    from slime_preflight.examination import examine
    from slime_preflight.found import State, found_json

    found = examine(Registry.from_environment(), engine_python or ())
    if as_json:
        typer.echo(json.dumps([found_json(one) for one in found], indent=1))
    else:
        width = max(len(one.what) for one in found)
        for one in found:
            typer.echo(f"{one.state:4}  {one.what:{width}}  {one.detail}")
            if one.advice:
                typer.echo(f"{'':4}  {'':{width}}  -> {one.advice}")
    if any(one.state is State.BAD for one in found):
        raise typer.Exit(1)
