"""Translate a launch line of another trainer into a run file: slime compat run.sh > run.toml"""

from __future__ import annotations

from typing import Any, Final

import typer

from slime_core.cli.commands import CommandGroup

DEFAULT: Final = "upstream"
"""The subcommand of `slime compat SCRIPT`."""


class CompatGroup(CommandGroup):
    """The commands below `slime compat`. One is in a file of its own, and is the entry `compat.NAME` of slime.commands."""

    parent = "compat"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Words that begin with no subcommand are those of the default one."""
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=CompatGroup,
    help=f"Translate a launch line of another trainer into a run file. Without a command: {DEFAULT}.",
    no_args_is_help=True,
)
