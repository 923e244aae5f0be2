"""AlgorithmCard: everything that is known about an algorithm without running it, for the terminal and a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.bind_algo import bind_algo
from slime_core.config.binder import Binder
from slime_core.config.bound import BoundAlgo
from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.contracts.algorithm import Recipe
from slime_core.errors import ConfigError
from slime_core.registry import Registry
from slime_core.registry.entry import Entry
from slime_plugin_kit.option_text import Option, describe


@dataclass(frozen=True, slots=True)
class CardPart:
    """A named part and the options that it reads, with the values that the recipe gives them."""

    slot: str
    part: BoundPlugin

    @property
    def options(self) -> list[Option]:
        found = []
        for option in describe(self.part.driver.Config):
            value = getattr(self.part.config, option.name)
            found.append(Option(option.name, option.type, toml_like(value), option.doc))
        return found


@dataclass(frozen=True, slots=True)
class AlgorithmCard:
    """A recipe, bound to its parts with nothing overridden."""

    entry: Entry
    algo: BoundAlgo

    @property
    def recipe(self) -> Recipe:
        return self.algo.recipe

    @property
    def parts(self) -> list[CardPart]:
        algo = self.algo
        named: list[tuple[str, BoundPlugin | None]] = [
            ("advantage", algo.advantage),
            *(("advantage_terms", part) for part in algo.advantage_terms),
            ("loss", algo.loss),
            ("critic_loss", algo.critic_loss),
            *(("shaping", part) for part in algo.shaping),
            *(("corrections", part) for part in algo.corrections),
        ]
        return [CardPart(slot, part) for slot, part in named if part is not None]

    @property
    def kernel_options(self) -> dict[str, str]:
        """Keys of the kernel that the recipe sets, beside those that name parts."""
        slots = {part.slot for part in self.parts}
        keys = type(self.algo.keys).model_fields
        return {key: toml_like(value) for key, value in self.recipe.options.items() if key in keys and key not in slots}

    @property
    def needs(self) -> list[str]:
        return sorted(self.algo.needs)


def algorithm_card(registry: Registry, entry: Entry) -> AlgorithmCard:
    """Raises ConfigError if a part cannot be found or bound."""
    binder = Binder(registry, Path(), [])
    algo = bind_algo(PluginTable(name=entry.qualified), binder)
    if algo is None or binder.problems:
        raise ConfigError(binder.problems)
    return AlgorithmCard(entry, algo)


def algorithms_page(registry: Registry, entries: Iterable[Entry]) -> str:
    """Markdown: a table of the algorithms, then a section for each."""
    cards = sorted((algorithm_card(registry, entry) for entry in entries), key=lambda card: card.entry.name)
    lines = [
        "# Algorithms",
        "",
        "Made by `slime plugins algorithms`. `--algo NAME` chooses one; every option below is also a flag and a key of "
        "the run file's `algo` table, and so is every part: `--set algo.loss=NAME`.",
        "",
        "| algorithm | advantage | loss | aggregation | from | what it is |",
        "|---|---|---|---|---|---|",
    ]
    for card in cards:
        recipe = card.recipe
        row = (
            f"[{card.entry.name}](#{card.entry.name})", recipe.advantage or "", recipe.loss,
            str(recipe.aggregation),
            card.entry.dist, escaped(recipe.summary),
        )  # fmt: skip
        lines.append(f"| {' | '.join(row)} |")
    for card in cards:
        lines += ["", *section(card)]
    return "\n".join(lines) + "\n"


def section(card: AlgorithmCard) -> list[str]:
    recipe = card.recipe
    lines = [f"## {card.entry.name}", "", recipe.summary, "", f"*{recipe.paper}*", ""]
    if recipe.formula:
        lines += ["```text", recipe.formula, "```", ""]
    if recipe.differences:
        lines += [f"Unlike {recipe.relative}:" if recipe.relative else "What is particular:", ""]
        lines += [f"- {difference}" for difference in recipe.differences] + [""]
    parts = ", ".join(f"{part.slot} `{part.part.name}`" for part in card.parts)
    lines += [f"Parts: {parts}; aggregation `{recipe.aggregation}`."]
    if recipe.filters:
        lines += [f"Filters that it adds: {', '.join(f'`{name}`' for name in recipe.filters)}."]
    if recipe.collector:
        lines += [f"Groups come together by `{recipe.collector}`."]
    if recipe.roles:
        lines += [f"Trains beside the policy: {', '.join(recipe.roles)}."]
    lines += [f"Needs: {', '.join(f'`{need}`' for need in card.needs) or 'nothing that has to be computed'}."]
    if card.kernel_options:
        lines += ["Sets: " + ", ".join(f"`{key} = {value}`" for key, value in card.kernel_options.items()) + "."]
    rows = [(option, part) for part in card.parts for option in part.options]
    if rows:
        lines += ["", "| option | of | default | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{option.name}` | {part.part.name} | `{option.default}` | {escaped(option.doc)} |"
            for option, part in rows
        ]
    return lines


def toml_like(value: object) -> str:
    """The value as in a run file; `unset` for None."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Sequence):
        return f"[{', '.join(toml_like(item) for item in value)}]"
    return str(value)


def escaped(text: str) -> str:
    return text.replace("|", "\\|")
