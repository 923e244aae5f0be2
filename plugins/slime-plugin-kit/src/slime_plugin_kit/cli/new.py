"""Write a distribution that passes the contract kit: slime new reward NAME, or slime new --from my_reward.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_core.errors import ConfigError

app = typer.Typer()


@app.command()
def new(
    kind: Annotated[
        str | None, typer.Argument(help="reward, filter, advantage, loss, algorithm, generator, tracker, hook")
    ] = None,
    name: Annotated[str | None, typer.Argument(help="What users type.")] = None,
    plugin: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Take this plugin file instead of a template.")
    ] = None,
    dist: Annotated[str | None, typer.Option(help="Name of the distribution; by default slime-NAME.")] = None,
    into: Annotated[Path | None, typer.Option(help="Folder to write; by default the distribution's name.")] = None,
) -> None:
    """Write a distribution that passes the contract kit: slime new reward NAME, or slime new --from my_reward.py."""
    from slime_plugin_kit.scaffold import kinds, plan_from, plan_new, write

    if plugin is not None:
        if kind is not None:
            raise ConfigError(f"slime new --from {plugin}: the names are those in the file; leave out {kind}.")
        plan = plan_from(plugin, dist)
    elif kind is None or name is None:
        raise ConfigError(f"slime new requires a kind and a name: slime new reward NAME. Kinds: {', '.join(kinds())}.")
    else:
        plan = plan_new(kind, name, dist)
    folder = into or Path(plan.dist)
    for path in write(plan, folder):
        typer.echo(path)
    typer.echo(f"Next: pip install --editable {folder} && pytest --slime-plugin {plan.dist}")
