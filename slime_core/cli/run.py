"""`slime run`: train."""

from __future__ import annotations

import typer

from slime_core.errors import Interrupted


def run(context: typer.Context) -> None:
    """Words are taken apart here, not by the option parser: which flags there are depends on the plugins."""
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
