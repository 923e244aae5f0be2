"""Translate a launch script of upstream slime (THUDM/slime)."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()

Lenient = Annotated[bool, typer.Option("--lenient", help="Exit code 0 even if the run would train differently.")]
Backend = Annotated[
    str | None, typer.Option("--backend", help="Training backend in place of the line's, such as fsdp.")
]
Engine = Annotated[str, typer.Option("--engine", help="Rollout engine in place of sglang, such as local.")]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT",
        help="Launch script and its arguments; or a launch line: -- python3 train.py ...",
        show_default=False,
    ),
]


@app.command()
def upstream(words: Words, lenient: Lenient = False, backend: Backend = None, engine: Engine = "sglang") -> None:
    """Translate a launch script of upstream slime (THUDM/slime) into a run file.

    The run file is printed, and what is left out or changed on stderr. Exit code 9: that changes the training.
    """
    from slime_compat.command import translate

    raise typer.Exit(translate(words, backend=backend, engine=engine, lenient=lenient))
