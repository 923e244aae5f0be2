"""Part: a plugin that a run uses, with its options bound; PartSpec is how it travels to a worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.contracts.driver import DriverConfig
from slime_core.registry import Entry, Registry, Resolved, bind


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """A part as it travels to a worker: plain data, resolved there again by name."""

    group: str
    name: str
    options: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps({"group": self.group, "name": self.name, "options": self.options}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> PartSpec:
        return cls(**json.loads(text))

    def resolve(self, registry: Registry) -> Part:
        resolved = registry.resolve(self.group, self.name, where=self.name)
        return Part.of(resolved, self.name, self.options, where=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A named choice with its options."""

    group: str
    name: str
    where: str
    """The table that asked for it, for messages."""
    entry: Entry
    driver: Any
    config: DriverConfig

    @classmethod
    def of(
        cls, resolved: Resolved, name: str, options: Mapping[str, Any], *, where: str, base: Path | None = None
    ) -> Part:
        """What `name` was resolved to, with its options bound. ConfigError if they do not fit."""
        entry, config = resolved.entry, bind(resolved, options, where=where, base=base)
        return cls(group=entry.group, name=name, where=where, entry=entry, driver=resolved.driver, config=config)

    def build(self) -> Any:
        """The object of the contract; heavy imports happen here."""
        return self.driver.build(self.config)

    def spec(self) -> PartSpec:
        return PartSpec(group=self.group, name=self.entry.qualified, options=self.config.model_dump(mode="json"))
