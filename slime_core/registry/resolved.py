"""Resolved: an entry and its imported object, checked against the contract of its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime_core.registry.entry import Entry

if TYPE_CHECKING:
    from slime_core.contracts.algorithm import Recipe


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    entry: Entry
    loaded: Any
    """A driver class, or a Recipe in the group of algorithms; in a plugin's own group, any object."""

    @property
    def driver(self) -> Any:
        """`loaded`, by the name that fits every group but algorithms; plain functions have been made into a driver."""
        return self.loaded

    @property
    def recipe(self) -> Recipe:
        from slime_core.contracts.algorithm import Recipe

        assert isinstance(self.loaded, Recipe)
        return self.loaded
