"""Describe the keys of a run file."""

from __future__ import annotations

from typing import Annotated

import typer

from slime_core.cli.plugins import PluginOption

app = typer.Typer(help="Describe the keys of a run file.", no_args_is_help=True)

Backend = Annotated[str | None, typer.Option("--backend", help="Take in this backend's options.")]
Engine = Annotated[str | None, typer.Option("--engine", help="Take in this engine's options.")]
Algo = Annotated[str | None, typer.Option("--algo", help="Take in the options of this algorithm's parts.")]
Reward = Annotated[str | None, typer.Option("--reward", help="Take in this reward's options.")]
Generate = Annotated[str | None, typer.Option("--generate", help="Take in this generator's options.")]


@app.command()
def schema(
    backend: Backend = None,
    engine: Engine = None,
    algo: Algo = None,
    reward: Reward = None,
    generate: Generate = None,
    plugin: PluginOption = None,
) -> None:
    """Print the JSON schema of a run file, with the options of the plugins that are named."""
    import json

    from slime_preflight.schema import run_schema

    chosen = named(backend=backend, engine=engine, algo=algo, reward=reward, generate=generate)
    typer.echo(json.dumps(run_schema(chosen, plugin or ()), indent=2))


@app.command()
def explain(
    key: Annotated[str | None, typer.Argument(help="A key or flag, such as train.lr, lr or --lr.")] = None,
    backend: Backend = None,
    engine: Engine = None,
    algo: Algo = None,
    reward: Reward = None,
    generate: Generate = None,
    plugin: PluginOption = None,
) -> None:
    """Explain what a key does, its type, default and owner; without a key, list all keys."""
    from slime_preflight.explain import explain_key, list_keys

    chosen = named(backend=backend, engine=engine, algo=algo, reward=reward, generate=generate)
    typer.echo(list_keys(chosen, plugin or ()) if key is None else explain_key(key, chosen, plugin or ()))


def named(**chosen: str | None) -> dict[str, str]:
    """The plugins that were passed, by the key that chooses them."""
    return {key: name for key, name in chosen.items() if name is not None}
