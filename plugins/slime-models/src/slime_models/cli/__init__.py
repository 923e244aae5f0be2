"""The subcommands of `slime` that this distribution brings, one a module. A module's docstring is the help line."""
