"""Translate a script of TRL's GRPOTrainer."""

from __future__ import annotations

from typing import Annotated

import typer

from slime_compat.cli.upstream import Lenient

app = typer.Typer()

Backend = Annotated[str, typer.Option("--backend", help="Training backend.")]
Engine = Annotated[str, typer.Option("--engine", help="Rollout engine, such as vllm or local.")]
Processes = Annotated[
    int | None, typer.Option("--num-processes", min=1, help="Processes, as for accelerate launch.", show_default="1")
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT",
        help="Python script; after --, the flags of its command line: slime compat trl -- SCRIPT.py --learning_rate 1e-6",
        show_default=False,
    ),
]


@app.command()
def trl(
    words: Words,
    lenient: Lenient = False,
    backend: Backend = "fsdp",
    engine: Engine = "sglang",
    num_processes: Processes = None,
) -> None:
    """Translate a script of TRL's GRPOTrainer into a run file. The script is read, not run.

    The run file is printed, and what is left out or changed on stderr. Exit code 9: that changes the training.
    """
    from slime_compat.trl.command import translate

    raise typer.Exit(translate(words, backend=backend, engine=engine, num_processes=num_processes, lenient=lenient))
