"""The subcommands of `slime` in this distribution, one per module. A module's docstring is the help line."""
