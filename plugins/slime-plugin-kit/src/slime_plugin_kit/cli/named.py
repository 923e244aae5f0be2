"""Entries that a user names: a name, or distribution/name."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core import groups
from slime_core.errors import PluginError, unknown_name
from slime_core.registry import Entry, Registry
from slime_core.registry.entry import by_distribution
from slime_core.registry.install_hints import install_hint


def named(registry: Registry, asked: str, group: str | None) -> Sequence[Entry]:
    """All entries of this name, in one group or in all. PluginError if there is none."""
    in_group = group_called(registry, group) if group else None
    dist, _, name = asked.rpartition("/")
    there = registry.entries(in_group)
    found = [entry for entry in there if entry.name == name and (not dist or entry.is_from(dist))]
    if not found:
        searched = [in_group] if in_group else list(groups.DRIVER_GROUPS)
        hint = next((hint for where in searched if (hint := install_hint(where, name))), "")
        known = [*dict.fromkeys(entry.name for entry in there)]
        kind = groups.NOUNS.get(in_group, "plugin") if in_group else "plugin"
        # Names of all groups would fill the screen.
        listing = by_distribution(there) if in_group else f"{len(known)} plugins; `slime plugins` lists them"
        raise PluginError(unknown_name("NAME", asked, kind, known, listing=listing, hint=hint and hint + "."))
    return found


def group_called(registry: Registry, asked: str) -> str:
    """A group by its name, with or without `slime.` before it."""
    known = sorted({*groups.NOUNS, *(entry.group for entry in registry.entries())})
    full = asked if asked.startswith("slime") else f"slime.{asked}"
    for group in (asked, full):
        if group in known:
            return group
    raise PluginError(unknown_name("--group", full, "group", known))
