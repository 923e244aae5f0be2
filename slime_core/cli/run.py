"""`slime run`: train."""

from __future__ import annotations

import typer


def run(context: typer.Context) -> None:
    """Words are taken apart here, not by the option parser: which flags there are depends on the plugins."""
    words = list(context.args)
    if not words or "--help" in words:
        from slime_core.cli.help import print_run_help

        print_run_help(words)
        return
    from slime_core.cli.training import run_words

    run_words(words)
