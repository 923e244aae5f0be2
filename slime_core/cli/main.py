"""`slime`: the commands, and how an error ends one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from slime_core import __version__
from slime_core.cli import config, evaluate, plugins, run
from slime_core.errors import SlimeError
from slime_models.cli import convert, models
from slime_plugin_kit import new
from slime_preflight import doctor, plan
from slime_viewer import view

app = typer.Typer(
    help="Train language models with reinforcement learning; every part is a plugin.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("run", context_settings=PASS_ON, help="Train: slime run run.toml [--flag value ...]")(run.run)
app.command(
    "plan", context_settings=PASS_ON, help="What a run would do and whether it fits, before anything is started."
)(plan.plan)
app.command("eval", context_settings=PASS_ON, help="Evaluate a model on the run file's evaluation sets.")(
    evaluate.evaluate
)
app.command("convert", context_settings=PASS_ON, help="Convert a model folder: slime convert SOURCE TARGET --to NAME.")(
    convert.convert
)
app.command("view")(view.view)
app.command("new")(new.new)
app.command("doctor")(doctor.doctor)
app.add_typer(plugins.app, name="plugins")
app.add_typer(config.app, name="config")
app.add_typer(models.app, name="models")


def print_version(wanted: bool) -> None:
    if wanted:
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
    try:
        app()
    except SlimeError as error:
        if debug:
            raise
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
