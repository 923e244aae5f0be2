"""Shapes of public models, and models with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slime_core.errors import ConfigError

app = typer.Typer(help="Shapes of public models, and models with random weights.", no_args_is_help=True)


@app.callback()
def models() -> None:
    """Shapes of public models, and models with random weights."""


@app.command("list")
def list_presets() -> None:
    """Presets: names, parameters, families and sizes."""
    from slime_models.model_presets import PRESETS

    typer.echo(
        f"{'preset':<20}{'parameters':>10}  {'model_type':<13}{'layers':>6}{'hidden':>7}{'heads':>6}{'experts':>8}"
    )
    for name, preset in PRESETS.items():
        sizes = preset.fields
        experts = sizes.get("num_experts") or sizes.get("n_routed_experts") or "-"
        typer.echo(
            f"{name:<20}{preset.billions:>9g}B  {preset.architecture:<13}{sizes['num_hidden_layers']:>6}"
            f"{sizes['hidden_size']:>7}{sizes['num_attention_heads']:>6}{experts:>8}"
        )


@app.command()
def show(name: Annotated[str, typer.Argument(help="A preset, as `slime models list` has it.")]) -> None:
    """Prints a preset's config as JSON: the keys of config.json that set the shape."""
    from slime_models.model_presets import find_preset

    preset = find_preset(name)
    typer.echo(json.dumps({"model_type": preset.architecture, **preset.fields}, indent=2))


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="Where it goes; must not exist yet.")],
    alphabet: Annotated[str, typer.Option(help="The characters that it can read and write, one token each.")],
    token: Annotated[
        list[str] | None, typer.Option(help="A longer piece of text that is one token; can be repeated.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Shape of a public model, in bfloat16; instead of the options below.")
    ] = None,
    architecture: Annotated[
        str | None, typer.Option(help="A causal architecture of transformers; qwen3 if not set.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="128 if not set.")] = None,
    num_layers: Annotated[int | None, typer.Option(help="3 if not set.")] = None,
    num_heads: Annotated[int | None, typer.Option(help="4 if not set.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="2 if not set.")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="384 if not set.")] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Tokens of prompt and response together; 512 if not set.")
    ] = None,
    seed: int = 0,
) -> None:
    """Make a model with random weights and a character tokenizer of its own, as a Hugging Face folder."""
    from slime_models.model_presets import find_preset
    from slime_models.new_model import ModelSizes, new_model, new_preset

    stated = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "max_length": max_length,
    }
    given: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    if preset is not None:
        if given or architecture:
            raise ConfigError("--preset: it decides the architecture and all sizes; leave those out, or leave it out.")
        parameters = new_preset(folder, find_preset(preset), alphabet=alphabet, tokens=token or [], seed=seed)
        typer.echo(f"{folder}: {preset} with {parameters:,} random parameters")
        return
    sizes, architecture = ModelSizes(**given), architecture or "qwen3"
    parameters = new_model(folder, architecture, sizes, alphabet=alphabet, tokens=token or [], seed=seed)
    typer.echo(f"{folder}: {architecture} with {parameters:,} parameters")
