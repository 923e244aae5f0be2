"""`slime`: the kernel's commands and their exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from slime_core import __version__
from slime_core.atomic_io.lasting_stream import lasting_output
from slime_core.cli import plugins
from slime_core.cli.commands import TAKES_ANY_WORDS, CommandGroup
from slime_core.errors import Interrupted, RankTimeout, SlimeError

app = typer.Typer(
    cls=CommandGroup,
    help="Train language models with reinforcement learning; every part is a plugin.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(plugins.app, name="plugins")


@app.command("run", context_settings=TAKES_ANY_WORDS, help="Train: slime run run.toml [--flag value ...]")
def run(context: typer.Context) -> None:
    """Parses its own arguments, not by click: the flags depend on the plugins."""
    words = list(context.args)
    if not words or "--help" in words:
        from slime_core.cli.help import print_run_help

        print_run_help(words)
        return
    from slime_core.cli.training import run_words

    try:
        run_words(words)
    except KeyboardInterrupt:
        raise Interrupted("interrupted before the run had started; nothing has changed.") from None


def print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"slime {__version__}")
        raise typer.Exit


@app.callback()
def slime(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning; every part is a plugin."""


def main() -> None:
    """The console script. A SlimeError is one paragraph and its exit code; a traceback only with --debug."""
    debug = "--debug" in sys.argv
    with lasting_output():
        try:
            app()
        except SlimeError as error:
            if debug and not isinstance(error, RankTimeout):
                raise
            sys.stdout.flush()
            print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
            if isinstance(error, RankTimeout):
                # At its end Python would wait for the thread that hangs.
                sys.stderr.flush()
                os._exit(error.exit_code)
            sys.exit(error.exit_code)
