"""BoundPlugin: a plugin that a run uses, with its options bound; PluginSpec is its form for workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import groups
from slime_core.contracts.driver import DriverConfig
from slime_core.registry import Entry, Registry, Resolved, bind
from slime_core.registry.boundary import foreign, with_name


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """A plugin and its options as plain data; a worker resolves it again by name."""

    group: str
    name: str
    options: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"group": self.group, "name": self.name, "options": self.options}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PluginSpec:
        return cls(**json.loads(text))

    def resolve(self, registry: Registry) -> BoundPlugin:
        resolved = registry.resolve(self.group, self.name, where=self.name)
        return BoundPlugin.of(resolved, self.name, self.options, where=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundPlugin:
    """A named choice with its options."""

    group: str
    name: str
    where: str
    """The table that names it, for error messages."""
    entry: Entry
    driver: Any
    config: DriverConfig

    @classmethod
    def of(
        cls, resolved: Resolved, name: str, options: Mapping[str, Any], *, where: str, base: Path | None = None
    ) -> BoundPlugin:
        """The resolved plugin `name` with its options bound. ConfigError if an option is wrong."""
        entry, config = resolved.entry, bind(resolved, options, where=where, base=base)
        return cls(group=entry.group, name=name, where=where, entry=entry, driver=resolved.driver, config=config)

    def build(self) -> Any:
        """Builds the object of the contract; heavy imports happen here. PluginError if that raises."""
        with foreign(self.title, "build"):
            return with_name(self.driver.build(self.config), self.title)

    def notices(self) -> tuple[str, ...]:
        with foreign(self.title, "notices"):
            return tuple(self.driver.notices(self.config))

    @property
    def title(self) -> str:
        """The plugin in messages: `group filter "mine.py/short"`."""
        noun = getattr(self.driver, "noun", "") or groups.NOUNS[self.group]
        return f'{noun} "{self.entry.qualified}"'

    def spec(self) -> PluginSpec:
        return PluginSpec(group=self.group, name=self.entry.qualified, options=self.config.model_dump(mode="json"))
