"""Commands that plugins provide: entries of the group `slime.commands`, each naming a `typer.Typer`."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final

import typer
from typer.core import TyperCommand, TyperGroup

from slime_core import __version__, groups
from slime_core.errors import PluginError
from slime_core.registry.entry import KERNEL, Entry
from slime_core.registry.install_hints import install_hint
from slime_core.registry.registry import DENY_VARIABLE, Registry

TAKES_ANY_WORDS: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that parses its own arguments, `--help` included."""


class CommandGroup(TyperGroup):
    """The kernel's commands, then those that installed distributions provide. Listing them imports no plugin."""

    parent: ClassVar[str] = ""
    """The part before the dot in the names of its entries."""

    @property
    def commands(self) -> MutableMapping[str, Any]:
        return {**self._own, **self._from_plugins}

    @commands.setter
    def commands(self, own: MutableMapping[str, Any]) -> None:
        self._own = own

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """PluginError for the name of a command that is switched off, or that could be installed."""
        if args[0] not in self.commands:
            self._refuse_known(f"{self.parent}.{args[0]}".removeprefix("."))
        return super().resolve_command(ctx, args)

    @cached_property
    def _registry(self) -> Registry:
        return Registry.from_environment()

    @cached_property
    def _from_plugins(self) -> dict[str, Any]:
        named: dict[str, list[Entry]] = defaultdict(list)
        for entry in self._registry.entries(groups.COMMANDS):
            parent, _, name = entry.name.rpartition(".")
            if parent == self.parent:
                named[name].append(entry)
        return {
            name: PluginCommand(name, self._registry, entries, is_kernels=name in self._own)
            for name, entries in sorted(named.items())
        }

    def _refuse_known(self, asked: str) -> None:
        if any((entry.group, entry.name) == (groups.COMMANDS, asked) for entry, _ in self._registry.listing()):
            self._registry.find(groups.COMMANDS, asked, where="command")
        if hint := install_hint(groups.COMMANDS, asked):
            raise PluginError(f"{typed(asked)}: not installed. {hint}.")


class PluginCommand(TyperCommand):
    """A command that is imported when it is typed. Its help line is the docstring of the module that the entry names."""

    def __init__(self, name: str, registry: Registry, entries: Sequence[Entry], *, is_kernels: bool) -> None:
        """`entries`: everything that has this name. `is_kernels`: the kernel has a command of this name too."""
        super().__init__(name)
        self._registry = registry
        self._entries = entries
        self._offered_by = [f"{KERNEL} {__version__}"] * is_kernels + [entry.provenance for entry in entries]

    def get_short_help_str(self, limit: int = 45) -> str:
        if len(self._offered_by) > 1:
            return f"Offered by {' and by '.join(self._offered_by)}."
        self.help = docstring(self._entries[0].module)
        return super().get_short_help_str(limit)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """PluginError if it cannot be imported, is no command, or has a name that is taken."""
        entry = self._entries[0]
        if len(self._offered_by) > 1:
            raise PluginError(
                f"{typed(entry.name)}: offered by {' and '.join(self._offered_by)}. Uninstall {entry.dist}, or switch it "
                f"off: {DENY_VARIABLE}={entry.dist}."
            )
        loaded = self._registry.load(entry, where=typed(entry.name))
        if problem := command_problem(entry, loaded):
            raise PluginError(f"{typed(entry.name)}: {problem}. Upgrade {entry.dist}, or uninstall it.")
        return click_command(loaded).make_context(info_name, args, parent=parent, **extra)


def command_problem(entry: Entry, loaded: object) -> str:
    """The reason why the object of an entry of `slime.commands` is no command; empty if it is one."""
    if isinstance(loaded, typer.Typer):
        return ""
    given = f"{entry.name} of {entry.provenance} ({entry.target})"
    return f"{given} is an object of type {type(loaded).__name__}; {entry.group} takes a typer.Typer"


def click_command(app: typer.Typer) -> Any:
    """The click command of a typer app: a single command if the app has only one, else a group."""
    frame = typer.Typer(add_completion=False, rich_markup_mode=None)
    if len(app.registered_commands) == 1 and app.registered_callback is None and not app.registered_groups:
        frame.registered_commands += app.registered_commands
    else:
        frame.add_typer(app, name="brought")
    (command,) = typer.main.get_group(frame).commands.values()
    return command


def docstring(module: str) -> str:
    """The docstring of a module, read from its source; empty if there is none. Neither it nor its package is imported."""
    top, *below = module.split(".")
    # A name without a dot is looked for without importing anything.
    spec = find_spec(top)
    if spec is None:
        return ""
    places = [Path(folder, *below) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    for file in files if below else [Path(spec.origin or "")]:
        if file.is_file():
            try:
                return ast.get_docstring(ast.parse(file.read_bytes())) or ""
            except SyntaxError:
                return ""
    return ""


def typed(name: str) -> str:
    """The command as a user types it: `slime group name` for `group.name`."""
    return f"slime {name.replace('.', ' ')}"
