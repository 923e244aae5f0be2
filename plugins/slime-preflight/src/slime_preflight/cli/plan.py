"""What a run would do and whether it fits, before anything is started."""

from __future__ import annotations

from typing import Final

import typer

from slime_core.cli.commands import TAKES_ANY_WORDS

app = typer.Typer()
USAGE: Final = """usage: slime plan run.toml [--json] [--device-memory 80GiB] [--flag value ...]

What the run would do, with nothing started and without GPUs: processes and devices, a step, bytes on each device by component
and phase, whether it fits, and which flags would lower the peak. All flags of `slime run` are understood.

--device-memory SIZE  Of one GPU, such as 80GiB: GPUs are planned for, though none is here. With --device cpu: of a machine.
--json                Print JSON.
--debug               Show tracebacks.

The exit code is 1 if the run is known not to fit."""


@app.command(context_settings=TAKES_ANY_WORDS)
def plan(context: typer.Context) -> None:
    """Words are taken apart as those of `slime run` are."""
    words = list(context.args)
    if not words or "--help" in words:
        typer.echo(USAGE)
        return
    from slime_core.cli.invocation import bind_invocation, parse_words

    typed = parse_words(words, switches=("json", "debug"), options=("device-memory",), command="plan")
    run = bind_invocation(typed)
    # Counting imports torch: errors in the run file are reported before.
    from slime_preflight.planning import print_plan

    given = typed.own.get("device-memory")
    fits = print_plan(run, None if given is None else str(given), as_json=bool(typed.own.get("json")))
    if not fits:
        raise typer.Exit(1)
