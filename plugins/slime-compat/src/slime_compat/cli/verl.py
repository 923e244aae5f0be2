"""Translate a configuration of verl."""

from __future__ import annotations

from typing import Annotated

import typer

from slime_compat.cli.upstream import Lenient

app = typer.Typer()

Backend = Annotated[str | None, typer.Option("--backend", help="Training backend in place of verl's: fsdp, megatron.")]
Engine = Annotated[str, typer.Option("--engine", help="Rollout engine, such as vllm or local.")]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG",
        help="YAML file; launch script and its arguments; or a launch line: -- python3 -m verl.trainer.main_ppo ...",
        show_default=False,
    ),
]


@app.command()
def verl(words: Words, lenient: Lenient = False, backend: Backend = None, engine: Engine = "sglang") -> None:
    """Translate a configuration of verl into a run file.

    The run file is printed, and what is left out or changed on stderr. Exit code 9: that changes the training.
    """
    from slime_compat.verl.command import translate

    raise typer.Exit(translate(words, backend=backend, engine=engine, lenient=lenient))
