"""The flags of the plugins that a run file chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slime_core import groups
from slime_core.config.flags import Flag, option_flags
from slime_core.config.roles import LOSS_KEYS
from slime_core.config.run import LauncherConfig
from slime_core.config.train import TrainConfig
from slime_core.contracts.algorithm import Recipe
from slime_core.errors import PluginError
from slime_core.registry import Registry

TABLES: Final = {
    "backend": (groups.BACKENDS, ""),
    "engine": (groups.ENGINES, "{name}-"),
    "reward": (groups.REWARDS, "reward."),
    "generate": (groups.GENERATORS, "generate."),
}
"""Tables that hold a plugin's name and options, to its group and the prefix of its flags."""


def chosen_flags(tables: Mapping[str, Any], registry: Registry, *, strict: bool = False) -> list[Flag]:
    """The flags of all plugins that the tables choose. Plugins that cannot be resolved are left for the binding to report,
    unless `strict`."""
    finder = Finder(registry, strict)
    flags = algo_flags(tables, finder)
    for table, (group, prefix) in TABLES.items():
        name = name_of(tables.get(table))
        flags += finder.options(group, name, (table,), prefix=prefix.format(name=name.rpartition("/")[2]))
    for role, table in as_table(tables.get("roles")).items():
        name = name_of(as_table(table).get("backend"))
        flags += finder.options(groups.BACKENDS, name, ("roles", role, "backend"), prefix=f"{role}-")
        name = name_of(as_table(table).get("optimizer"))
        flags += finder.options(groups.OPTIMIZERS, name, ("roles", role, "optimizer"), prefix=f"{role}-")
    name = name_of(as_table(tables.get("train")).get("optimizer")) or TrainConfig().optimizer.name
    flags += finder.options(groups.OPTIMIZERS, name, ("train", "optimizer"))
    flags += finder.options(groups.SOURCES, word_of(as_table(tables.get("data")).get("source", "files")), ("data",))
    engine = finder.find(groups.ENGINES, name_of(tables.get("engine")), "engine")
    preferred = engine.transports[:1] if engine is not None else ()
    launcher = word_of(as_table(tables.get("launcher")).get("name", LauncherConfig().name))
    flags += finder.options(groups.LAUNCHERS, launcher, ("launcher",))
    transport = word_of(as_table(tables.get("sync")).get("transport")) or "".join(preferred)
    flags += finder.options(groups.TRANSPORTS, transport, ("sync",))
    recipe = finder.find(groups.ALGORITHMS, name_of(tables.get("algo")), "algo")
    collector = name_of(as_table(tables.get("rollout")).get("collector")) or getattr(recipe, "collector", None) or ""
    return flags + finder.options(groups.COLLECTORS, collector, ("rollout", "collector"), prefix="collector.")


def absent_flags(registry: Registry) -> dict[str, list[str]]:
    """Flags of all installed backends, engines, transports, launchers and optimizers, each to the flags that choose them."""
    finder = Finder(registry, strict=False)
    found: dict[str, list[str]] = {}
    for table, group, prefix in (
        ("backend", groups.BACKENDS, ""),
        ("engine", groups.ENGINES, "{name}-"),
        ("transport", groups.TRANSPORTS, ""),
        ("launcher", groups.LAUNCHERS, ""),
        ("optimizer", groups.OPTIMIZERS, ""),
    ):
        for name in sorted({entry.name for entry in registry.entries(group)}):
            for flag in finder.options(group, name, (table,), prefix=prefix.format(name=name)):
                for spelled in (flag.name, *flag.aliases):
                    found.setdefault(spelled, []).append(f"--{table} {name}")
    return found


def algo_flags(tables: Mapping[str, Any], finder: Finder) -> list[Flag]:
    """The options of a recipe's parts after the run file's overrides; all are flat in the algo table."""
    algo = as_table(tables.get("algo"))
    recipe = finder.find(groups.ALGORITHMS, name_of(algo), "algo")
    if not isinstance(recipe, Recipe):
        return []
    parts: list[tuple[str, Any]] = [
        (groups.ADVANTAGES, algo.get("advantage", recipe.advantage)),
        *(
            (groups.ADVANTAGES, item)
            for item in items_of(algo.get("advantage_terms", recipe.options.get("advantage_terms", ())))
        ),
        (groups.LOSSES, algo.get("loss", recipe.loss)),
        *((groups.ADVANTAGES, item) for item in items_of(algo.get("shaping", recipe.shaping))),
        *((groups.CORRECTIONS, item) for item in items_of(algo.get("corrections", recipe.corrections))),
        *((groups.LOSSES, algo.get(key, recipe.options.get(key))) for key in LOSS_KEYS.values()),
    ]
    return [flag for group, item in parts for flag in finder.options(group, name_of(item), ("algo",))]


@dataclass(frozen=True, slots=True)
class Finder:
    """Resolves names of plugins."""

    registry: Registry
    strict: bool

    def find(self, group: str, name: str, where: str) -> Any:
        """The plugin of this name; None if it is empty or, unless strict, cannot be resolved."""
        if not name:
            return None
        try:
            return self.registry.resolve(group, name, where=where).loaded
        except PluginError:
            if self.strict:
                raise
            return None

    def options(self, group: str, name: str, path: tuple[str, ...], *, prefix: str = "") -> list[Flag]:
        """The flags of the driver of this name, if there is one."""
        driver = self.find(group, name, ".".join(path))
        if driver is None:
            return []
        entry = self.registry.find(group, name, where=group)
        owner = f"{entry.name} ({entry.provenance})"
        aliases, tables = driver.flag_aliases, driver.table_options()
        return list(option_flags(driver.Config, path, owner, prefix=prefix, aliases=aliases, tables=tables))


def name_of(value: Any) -> str:
    """The name in a plugin table; empty if there is none."""
    return word_of(as_table(value).get("name"))


def word_of(value: Any) -> str:
    """A name of a plugin; empty for a value of another type, which the validation reports."""
    return value if isinstance(value, str) else ""


def items_of(value: Any) -> Sequence[Any]:
    """A list; empty for a value of another type, which the validation reports."""
    return value if isinstance(value, list | tuple) else ()


def as_table(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"name": value}
    return value if isinstance(value, Mapping) else {}
