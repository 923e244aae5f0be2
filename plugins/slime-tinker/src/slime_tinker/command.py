"""Serve programs of the Tinker SDK: slime serve run.toml. Keys: slime serve keys."""

from __future__ import annotations

from typing import Any, Final

import typer

from slime_core.cli.commands import CommandGroup

DEFAULT: Final = "run"
"""The subcommand of `slime serve RUN_FILE`."""


class ServeGroup(CommandGroup):
    """The commands below `slime serve`, each the entry `serve.NAME` of slime.commands."""

    parent = "serve"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words that begin with no subcommand are those of the default one."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ServeGroup, help=f"Serve programs of the Tinker SDK. Without a command: {DEFAULT}.", no_args_is_help=True
)
