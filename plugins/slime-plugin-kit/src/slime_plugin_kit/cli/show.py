"""Describe a plugin: what it does, its distribution, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from slime_core import groups
from slime_core.cli.commands import docstring
from slime_core.cli.plugins import PluginOption
from slime_core.errors import ConfigError, PluginError
from slime_core.registry import Entry, Registry
from slime_plugin_kit.cli.named import named

if TYPE_CHECKING:
    from slime_core.contracts.algorithm import Recipe
    from slime_core.registry import Resolved

app = typer.Typer()


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A plugin's name, or distribution/name.")],
    group: Annotated[str | None, typer.Option("--group", help="Only in this group, such as slime.rewards.")] = None,
    plugin: PluginOption = None,
) -> None:
    """Describe a plugin: what it does, its distribution, and its options."""
    registry = Registry.from_environment(plugin or ())
    console = Console(markup=False, highlight=False, soft_wrap=True)
    broken: list[PluginError] = []
    found = named(registry, name, group)
    for position, entry in enumerate(found):
        if position:
            console.print()
        try:
            show_entry(console, registry, entry)
        except PluginError as error:
            broken.append(error)
            console.print(f"it cannot be used: {error}")
    if len(broken) == len(found):
        raise PluginError("\n".join(map(str, broken)))


def show_entry(console: Console, registry: Registry, entry: Entry) -> None:
    console.print(f"{entry.name}  ({groups.NOUNS.get(entry.group, entry.group)}, {entry.group})")
    console.print(f"from {entry.provenance}: {entry.target}")
    if entry.group == groups.HOOKS:
        show_hooks(console, registry.load(entry, where=entry.qualified))
        return
    if entry.group in (groups.COMMANDS, groups.PANELS):
        console.print(paragraph(docstring(entry.module)))
        return
    resolved = registry.resolve(entry.group, entry.qualified, where="NAME")
    if entry.group == groups.ALGORITHMS:
        show_recipe(console, registry, resolved.entry, resolved.recipe)
    elif entry.group in groups.NOUNS:
        show_driver(console, resolved)
    else:
        console.print(doc_head(resolved.loaded))


def show_hooks(console: Console, module: Any) -> None:
    from slime_core.contracts.hookspecs import HOOK_NAMES
    from slime_core.registry.hooks import Hooks

    Hooks({"shown/module": module})
    console.print(doc_head(module))
    console.print(f"observes: {', '.join(name for name in HOOK_NAMES if hasattr(module, name))}")


def show_driver(console: Console, resolved: Resolved) -> None:
    from slime_plugin_kit.option_text import describe

    console.print(doc_head(resolved.driver))
    traits = [(name, trait_text(getattr(resolved.driver, name))) for name in trait_names(resolved.driver)]
    for name, text in traits:
        console.print(f"{name}: {text}")
    options = describe(resolved.driver.Config)
    if options:
        print_table(("option", "type", "default", "meaning"), [(o.name, o.type, o.default, o.doc) for o in options])
    else:
        console.print("It has no options.")
    if patches := resolved.driver.patches():
        console.print("\nIn the library behind it, without a change to its files:")
        rows = [(p.target, p.purpose, p.when, "yes" if p.found else "no") for p in patches]
        print_table(("patched", "for", "in", "found"), rows)


def trait_names(driver: type) -> list[str]:
    """Public class variables of the contract, such as what it needs."""
    from slime_core.contracts.driver import Driver

    return [
        name
        for cls in reversed(driver.__mro__)
        if issubclass(cls, Driver) and cls is not Driver and cls.__module__.startswith("slime_core.contracts.")
        for name, value in vars(cls).items()
        if not name.startswith("_") and not callable(value) and not isinstance(value, classmethod)
    ]


def trait_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset | tuple):
        return ", ".join(sorted(map(str, value))) or "none"
    return str(value)


def show_recipe(console: Console, registry: Registry, entry: Entry, recipe: Recipe) -> None:
    from slime_plugin_kit.algorithm_card import algorithm_card

    print_recipe(console, recipe)
    try:
        card = algorithm_card(registry, entry)
    except ConfigError as error:
        console.print("it cannot run as it is:")
        for problem in error.problems:
            console.print(f"  {problem}")
        return
    console.print(f"needs: {', '.join(card.needs) or 'nothing that has to be computed'}")
    options = [(o.name, part.part.name, o.type, o.default, o.doc) for part in card.parts for o in part.options]
    if options:
        print_table(("option", "of", "type", "default", "meaning"), options)


def print_recipe(console: Console, recipe: Recipe) -> None:
    """Prints the recipe's own description."""
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


def doc_head(thing: Any) -> str:
    """The first paragraph of its own docstring, not of one that it inherits."""
    return paragraph((getattr(thing, "__doc__", None) or "") if "__doc__" in vars(thing) else "")


def paragraph(text: str) -> str:
    """The first one, as one line."""
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split()) or "No description."


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in header:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(markup=False, highlight=False).print(table)
