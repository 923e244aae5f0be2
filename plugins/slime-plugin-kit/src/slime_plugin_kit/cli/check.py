"""Import each plugin and validate its contract. The exit code is 1 if one breaks it."""

from __future__ import annotations

import json

import typer

from slime_core.cli.plugins import JsonOption, PluginOption, print_columns, record
from slime_core.registry import Registry

app = typer.Typer()


@app.command()
def check(as_json: JsonOption = False, plugin: PluginOption = None) -> None:
    """Import each plugin and validate its contract. The exit code is 1 if one breaks it."""
    from slime_plugin_kit.inspection import inspect_entries

    findings = inspect_entries(Registry.from_environment(plugin or ()))
    failed = [finding for finding in findings if finding.problems]
    if as_json:
        typer.echo(json.dumps([record(f.entry, f.status) | {"problems": f.problems} for f in findings], indent=1))
    elif failed:
        rows = [(f.entry.group, f.entry.name, f.entry.provenance, problem) for f in failed for problem in f.problems]
        print_columns(("group", "name", "distribution", "problem"), rows)
        typer.echo(f"{len(failed)} of {len(findings)} plugins break their contract.", err=True)
    else:
        typer.echo(f"{len(findings)} plugins keep their contracts.")
    if failed:
        raise typer.Exit(1)
