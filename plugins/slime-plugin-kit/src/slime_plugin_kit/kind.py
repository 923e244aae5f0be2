"""Kind and Property: what has to be proven of a plugin, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_plugin_kit.case import Case, Subject


def always(case: Case) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Property:
    """`name` is that of its test without `test_`; `description` completes "PLUGIN breaks its contract: "."""

    name: str
    description: str
    once: bool = False
    """One case for the entry point, not one for each set of options."""
    applies: Callable[[Case], bool] = always


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`name` is that of the module of its tests."""

    name: str
    holds: Callable[[Subject], bool]
    properties: tuple[Property, ...]


def registered_in(group: str, *, as_a: type | None = None, but_not: type | None = None) -> Callable[[Subject], bool]:
    """Whether a subject is of this group, and a driver of this class where the group holds two."""

    def holds(subject: Subject) -> bool:
        if subject.entry.group != group or subject.resolved is None:
            return False
        loaded: Any = subject.resolved.loaded
        if as_a is not None and not issubclass(loaded, as_a):
            return False
        return but_not is None or not issubclass(loaded, but_not)

    return holds


def prop(name: str, description: str, *, once: bool = False, applies: Callable[[Case], bool] = always) -> Property:
    return Property(name=name, description=description, once=once, applies=applies)
