"""Print a page in Markdown on the algorithms: formula, paper, differences, needs, options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from slime_core import groups
from slime_core.cli.plugins import PluginOption
from slime_core.registry import Entry, Registry
from slime_plugin_kit.cli.named import named

app = typer.Typer()


@app.command()
def algorithms(
    names: Annotated[list[str] | None, typer.Argument(help="Only these; by default all that are installed.")] = None,
    plugin: PluginOption = None,
) -> None:
    """Print a page in Markdown on the algorithms: formula, paper, differences, needs, options."""
    from slime_plugin_kit.algorithm_card import algorithms_page

    registry = Registry.from_environment(plugin or ())
    entries: Sequence[Entry] = registry.entries(groups.ALGORITHMS)
    if names:
        entries = [entry for name in names for entry in named(registry, name, groups.ALGORITHMS)]
    typer.echo(algorithms_page(registry, entries), nl=False)
