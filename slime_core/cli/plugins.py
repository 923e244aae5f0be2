"""`slime plugins`: what is installed.

Listing imports no plugin and must stay fast, so describing and checking are commands of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_core.cli.commands import CommandGroup
from slime_core.registry import Entry, Registry, Status


class PluginsGroup(CommandGroup):
    """The commands below `slime plugins`."""

    parent = "plugins"


app = typer.Typer(cls=PluginsGroup, help="List, check and describe plugins.", no_args_is_help=False)


def with_files_of_group(context: typer.Context, files: list[Path] | None) -> list[Path]:
    """The files, after those that were typed before the command: `slime plugins --plugin FILE show NAME`."""
    of_group = () if context.parent is None else context.parent.params.get("plugin") or ()
    return list(dict.fromkeys([*of_group, *(files or ())]))


def or_of_group(context: typer.Context, as_json: bool) -> bool:
    """True also if --json was typed before the command."""
    return as_json or bool(context.parent and context.parent.params.get("as_json"))


PluginOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE", help="A plugin file to include; can be repeated.", callback=with_files_of_group
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=or_of_group)]


@app.callback(invoke_without_command=True)
def plugins(
    context: typer.Context,
    as_json: JsonOption = False,
    check: Annotated[bool, typer.Option("--check", help="Import each plugin and validate its contract.")] = False,
    plugin: PluginOption = None,
) -> None:
    """List every plugin: group, name, distribution, version, status. Imports none of them, unless one is checked."""
    if context.invoked_subcommand is not None:
        if check:
            raise typer.BadParameter(f"--check and the command {context.invoked_subcommand}: type one of the two.")
        return
    if check:
        invoke(context, "check")
        return
    listing = Registry.from_environment(plugin or ()).listing()
    if as_json:
        typer.echo(json.dumps([record(entry, status) for entry, status in listing], indent=1))
    else:
        rows = [(e.group, e.name, e.dist, e.version, str(status)) for e, status in listing]
        print_columns(("group", "name", "distribution", "version", "status"), rows)


def invoke(context: typer.Context, *words: str) -> None:
    """Runs a command of the context's group, as if its words had been typed."""
    group = context.command
    assert isinstance(group, CommandGroup)
    name, command, rest = group.resolve_command(context, list(words))
    with command.make_context(name, rest, parent=context) as below:
        # Not `command`: what is loaded takes its place.
        below.command.invoke(below)


def record(entry: Entry, status: Status) -> dict[str, Any]:
    """An entry as a JSON object."""
    keys = ("group", "name", "dist", "version", "target")
    return {key: getattr(entry, key) for key in keys} | {"status": str(status)}


def print_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints aligned columns, one line per row at any terminal width, so that names stay whole for grep."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
