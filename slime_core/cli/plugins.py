"""`slime plugins`: what is installed, whether it keeps its contracts, and what one of them is.

Listing imports no plugin and must stay fast, so everything that only printing or checking needs is imported there.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_core import groups
from slime_core.errors import ConfigError, PluginError, unknown_name
from slime_core.registry import Entry, Registry, Status
from slime_core.registry.entry import by_distribution
from slime_core.registry.install_hints import install_hint

if TYPE_CHECKING:
    from rich.console import Console

    from slime_core.contracts.algorithm import Recipe
    from slime_core.registry import Resolved

app = typer.Typer(help="List, check and describe plugins.", no_args_is_help=False)

PluginOption = Annotated[
    list[Path] | None, typer.Option("--plugin", metavar="FILE", help="A plugin file to take in; can be repeated.")
]


@app.callback(invoke_without_command=True)
def plugins(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Import each plugin and validate its contract.")] = False,
    plugin: PluginOption = None,
) -> None:
    """List every plugin: group, name, distribution, version, status. Imports none of them unless told to check."""
    if context.invoked_subcommand is not None:
        return
    registry = Registry.from_environment(plugin or ())
    if check:
        _check(registry, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps([_record(entry, status) for entry, status in registry.listing()], indent=1))
    else:
        rows = [(e.group, e.name, e.dist, e.version, str(status)) for e, status in registry.listing()]
        _print_columns(("group", "name", "distribution", "version", "status"), rows)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A plugin's name, or distribution/name.")],
    group: Annotated[str | None, typer.Option("--group", help="Only in this group, such as slime.rewards.")] = None,
    plugin: PluginOption = None,
) -> None:
    """Describe a plugin: what it does, whose it is, and its options."""
    registry = Registry.from_environment(plugin or ())
    console = _console()
    for position, entry in enumerate(_named(registry, name, group)):
        if position:
            console.print()
        _show(console, registry, entry)


@app.command()
def algorithms(
    names: Annotated[list[str] | None, typer.Argument(help="Only these; by default all that are installed.")] = None,
    plugin: PluginOption = None,
) -> None:
    """Print a page in Markdown on the algorithms: formula, paper, differences, needs, options."""
    from slime_core.config.algorithm_card import algorithms_page

    registry = Registry.from_environment(plugin or ())
    entries: Sequence[Entry] = registry.entries(groups.ALGORITHMS)
    if names:
        entries = [entry for name in names for entry in _named(registry, name, groups.ALGORITHMS)]
    typer.echo(algorithms_page(registry, entries), nl=False)


def _named(registry: Registry, asked: str, group: str | None) -> Sequence[Entry]:
    wanted = _group_called(registry, group) if group else None
    dist, _, name = asked.rpartition("/")
    there = registry.entries(wanted)
    found = [entry for entry in there if entry.name == name and (not dist or entry.is_from(dist))]
    if not found:
        searched = [wanted] if wanted else list(groups.DRIVER_GROUPS)
        hint = next((hint for where in searched if (hint := install_hint(where, name))), "")
        known = [*dict.fromkeys(entry.name for entry in there)]
        kind = groups.NOUNS.get(wanted, "plugin") if wanted else "plugin"
        raise PluginError(
            unknown_name("NAME", asked, kind, known, listing=by_distribution(there), hint=hint and hint + ".")
        )
    return found


def _group_called(registry: Registry, asked: str) -> str:
    known = sorted({*groups.NOUNS, *(entry.group for entry in registry.entries())})
    full = asked if asked.startswith("slime") else f"slime.{asked}"
    for group in (asked, full):
        if group in known:
            return group
    raise PluginError(unknown_name("--group", full, "group", known))


def _check(registry: Registry, *, as_json: bool) -> None:
    from slime_plugin_kit.inspection import inspect_entries

    findings = inspect_entries(registry)
    failed = [finding for finding in findings if finding.problems]
    if as_json:
        typer.echo(json.dumps([_record(f.entry, f.status) | {"problems": f.problems} for f in findings], indent=1))
    elif failed:
        rows = [(f.entry.group, f.entry.name, f.entry.provenance, problem) for f in failed for problem in f.problems]
        _print_columns(("group", "name", "distribution", "problem"), rows)
        typer.echo(f"{len(failed)} of {len(findings)} plugins break their contract.", err=True)
    else:
        typer.echo(f"{len(findings)} plugins keep their contracts.")
    if failed:
        raise typer.Exit(1)


def _show(console: Console, registry: Registry, entry: Entry) -> None:
    console.print(f"{entry.name}  ({groups.NOUNS.get(entry.group, entry.group)}, {entry.group})")
    console.print(f"from {entry.provenance}: {entry.target}")
    if entry.group == groups.HOOKS:
        _show_hooks(console, registry.load(entry, where=entry.qualified))
        return
    resolved = registry.resolve(entry.group, entry.qualified, where="NAME")
    if entry.group == groups.ALGORITHMS:
        _show_recipe(console, registry, resolved.entry, resolved.recipe)
    elif entry.group in groups.NOUNS:
        _show_driver(console, resolved)
    else:
        console.print(_doc_head(resolved.loaded))


def _show_hooks(console: Console, module: Any) -> None:
    from slime_core.contracts.hookspecs import HOOK_NAMES
    from slime_core.registry.hooks import Hooks

    Hooks({"shown/module": module})
    console.print(_doc_head(module))
    console.print(f"observes: {', '.join(name for name in HOOK_NAMES if hasattr(module, name))}")


def _show_driver(console: Console, resolved: Resolved) -> None:
    from slime_core.registry.options import describe

    console.print(_doc_head(resolved.driver))
    traits = [(name, _trait_text(getattr(resolved.driver, name))) for name in _trait_names(resolved.driver)]
    for name, text in traits:
        console.print(f"{name}: {text}")
    options = describe(resolved.driver.Config)
    if options:
        _print_table(("option", "type", "default", "meaning"), [(o.name, o.type, o.default, o.doc) for o in options])
    else:
        console.print("It has no options.")
    if patches := resolved.driver.patches():
        console.print("\nIn the library behind it, without a change to its files:")
        rows = [(p.target, p.purpose, p.when, "yes" if p.found else "no") for p in patches]
        _print_table(("patched", "for", "in", "found"), rows)


def _trait_names(driver: type) -> list[str]:
    """Public class variables of the contract, such as what it needs."""
    from slime_core.contracts.driver import Driver

    return [
        name
        for cls in reversed(driver.__mro__)
        if issubclass(cls, Driver) and cls is not Driver and cls.__module__.startswith("slime_core.contracts.")
        for name, value in vars(cls).items()
        if not name.startswith("_") and not callable(value) and not isinstance(value, classmethod)
    ]


def _trait_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset | tuple):
        return ", ".join(sorted(map(str, value))) or "none"
    return str(value)


def _show_recipe(console: Console, registry: Registry, entry: Entry, recipe: Recipe) -> None:
    from slime_core.config.algorithm_card import recipe_card

    lines = {
        "paper": recipe.paper,
        "relative": recipe.relative or "",
        "formula": recipe.formula,
        "advantage": recipe.advantage,
        "loss": recipe.loss,
        "aggregation": str(recipe.aggregation),
        "shaping": ", ".join(recipe.shaping),
        "corrections": ", ".join(recipe.corrections),
        "filters": ", ".join(recipe.filters),
        "collector": recipe.collector or "",
        "roles": ", ".join(recipe.roles),
    }
    console.print(recipe.summary)
    for name, text in lines.items():
        if text:
            console.print(f"{name}: {text}")
    for number, difference in enumerate(recipe.differences):
        console.print(f"{'differences: ' if number == 0 else '             '}{difference}")
    for number, (name, value) in enumerate(recipe.options.items()):
        console.print(f"{'options: ' if number == 0 else '         '}{name} = {value!r}")
    try:
        card = recipe_card(registry, entry)
    except ConfigError as error:
        console.print("it cannot run as it is:")
        for problem in error.problems:
            console.print(f"  {problem}")
        return
    console.print(f"needs: {', '.join(card.needs) or 'nothing that has to be computed'}")
    options = [(o.name, part.part.name, o.type, o.default, o.doc) for part in card.parts for o in part.options]
    if options:
        _print_table(("option", "of", "type", "default", "meaning"), options)


def _doc_head(thing: Any) -> str:
    """The first paragraph of its own docstring, not of one that it inherits."""
    own = inspect.cleandoc(getattr(thing, "__doc__", None) or "") if "__doc__" in vars(thing) else ""
    return " ".join(own.split("\n\n")[0].split()) or "No description."


def _record(entry: Entry, status: Status) -> dict[str, Any]:
    return {
        "group": entry.group,
        "name": entry.name,
        "dist": entry.dist,
        "version": entry.version,
        "target": entry.target,
        "status": str(status),
    }


def _console() -> Console:
    from rich.console import Console

    return Console(markup=False, highlight=False, soft_wrap=True)


def _print_columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Aligned, a line a row however narrow the terminal is: names stay whole, for eyes and for grep."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
