"""Binder: a table of the run file becomes a Part; problems are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.part import BoundPlugin
from slime_core.config.plugin_table import PluginTable
from slime_core.errors import ConfigError, PluginError
from slime_core.registry import Registry


@dataclass(frozen=True, slots=True)
class Binder:
    """Collects problems instead of stopping at the first."""

    registry: Registry
    base: Path
    problems: list[str]

    def part(
        self, group: str, table: PluginTable, where: str, expect: type | None = None, *, key: str | None = None
    ) -> BoundPlugin | None:
        """The driver of `table.name` with its options bound; None after noting the problem. `expect`: the driver class, for
        groups that hold two kinds of driver. `key`: where its name was written, by default `name` in the table."""
        try:
            resolved = self.registry.resolve(group, table.name, where=key or f"{where}.name", expect=expect)
            return BoundPlugin.of(resolved, table.name, table.options, where=where, base=self.base)
        except ConfigError as error:
            self.problems.extend(error.problems)
        except PluginError as error:
            self.problems.append(str(error))
        return None

    def parts(
        self, group: str, tables: Sequence[PluginTable], where: str, expect: type | None = None
    ) -> tuple[BoundPlugin, ...]:
        bound = [self.part(group, table, f"{where}[{number}]", expect) for number, table in enumerate(tables)]
        return tuple(part for part in bound if part is not None)
