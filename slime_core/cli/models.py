"""`slime models`: make small models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make small models.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Make small models."""


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Where it goes; must not exist yet.")],
    alphabet: Annotated[str, typer.Option(help="The characters that it can read and write, one token each.")],
    token: Annotated[
        list[str] | None, typer.Option(help="A longer piece of text that is one token; can be repeated.")
    ] = None,
    architecture: Annotated[str, typer.Option(help="A causal architecture of transformers.")] = "qwen3",
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_length: Annotated[int, typer.Option(help="Tokens of prompt and answer together.")] = 512,
    seed: int = 0,
) -> None:
    """Make a model with random weights and a character tokenizer of its own, as a Hugging Face folder."""
    from slime_core.new_model import ModelSizes, new_model

    sizes = ModelSizes(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_length=max_length,
    )
    parameters = new_model(folder, architecture, sizes, alphabet=alphabet, tokens=token or [], seed=seed)
    typer.echo(f"{folder}: {architecture} with {parameters:,} parameters")
