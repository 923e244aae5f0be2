"""Registry: the names of all plugins, and the object of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from slime_core import groups
from slime_core.errors import PluginError, near_matches, unknown_name
from slime_core.registry.entry import KERNEL, Entry, by_distribution, normalized
from slime_core.registry.install_hints import install_hint
from slime_core.registry.installed import installed_entries
from slime_core.registry.resolved import Resolved

if TYPE_CHECKING:
    from slime_core.registry.plugin_file import PluginFile

ALLOW_VARIABLE: Final = "SLIME_PLUGINS_ALLOW"
DENY_VARIABLE: Final = "SLIME_PLUGINS_DENY"
TRACE_VARIABLE: Final = "SLIME_HOOK_TRACE"


class Status(StrEnum):
    OK = "ok"
    DUPLICATE = "duplicate"
    """Another distribution has the name too: an error once it is used without `dist/`."""
    OFF = "off"
    """Switched off by the allow-list or the deny-list."""
    OLD = "requires slime-core"
    """Built for 0.1: it is not loaded."""
    UNKNOWN_GROUP = "unknown group"
    """No part of slime reads this group."""


class Registry:
    """Immutable: what is installed is read once, at construction. Listing imports no plugin; resolving imports one.

    `allow` and `deny`: names of distributions; the kernel's own entries and plugin files, which are named one by one, are
    always on. `trace`: gets a line for everything that is loaded.
    """

    __slots__ = ("_entries", "_objects", "_points", "allow", "deny", "plugin_files", "trace")

    def __init__(
        self,
        plugin_files: Sequence[PluginFile | Path] = (),
        *,
        allow: Collection[str] | None = None,
        deny: Collection[str] = (),
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.plugin_files: Final[tuple[PluginFile, ...]] = _read(plugin_files) if plugin_files else ()
        self._points: dict[Entry, EntryPoint] = installed_entries()
        self._objects: dict[Entry, object] = {}
        for file in self.plugin_files:
            self._objects |= file.load()
        self._entries: tuple[Entry, ...] = tuple(sorted({*self._points, *self._objects}))
        self.allow: Final[tuple[str, ...] | None] = (
            None if allow is None else self._distributions(allow, ALLOW_VARIABLE)
        )
        self.deny: Final[tuple[str, ...]] = self._distributions(deny, DENY_VARIABLE)
        self.trace: Final = trace

    @classmethod
    def from_environment(
        cls,
        plugin_files: Sequence[PluginFile | Path] = (),
        *,
        environ: Mapping[str, str] = os.environ,
        trace: Callable[[str], None] | None = None,
    ) -> Registry:
        """Reads SLIME_PLUGINS_ALLOW and SLIME_PLUGINS_DENY (distributions, separated by commas), and takes `trace` only
        if SLIME_HOOK_TRACE is set."""
        allow = environ.get(ALLOW_VARIABLE)
        return cls(
            plugin_files,
            allow=None if allow is None else _listed(allow),
            deny=_listed(environ.get(DENY_VARIABLE, "")),
            trace=trace if environ.get(TRACE_VARIABLE, "") not in ("", "0") else None,
        )

    def entries(self, group: str | None = None) -> list[Entry]:
        """The entries that can be used, in one group or in all, sorted by group, name and distribution."""
        return [e for e in self._entries if group in (None, e.group) and not self._is_off(e)]

    def listing(self) -> list[tuple[Entry, Status]]:
        """All entries, each with the problems that its name shows without an import."""
        return [(entry, self._status(entry)) for entry in self._entries]

    def is_file(self, entry: Entry) -> bool:
        """True if the entry comes from a plugin file."""
        return entry in self._objects

    def find(self, group: str, asked: str, *, where: str, expect: type | None = None) -> Entry:
        """The entry called `asked` (`name` or `dist/name`), without importing it.

        `where`: the key or flag that has the name, for the PluginError if it is unknown, switched off, or offered by two
        distributions. `expect`: the kind of driver that the error lists.
        """
        dist, _, name = asked.rpartition("/")
        named = [e for e in self._entries if e.group == group and e.name == name and (not dist or e.is_from(dist))]
        found = [entry for entry in named if not self._is_off(entry)]
        if len(found) == 1:
            return found[0]
        if found:
            raise PluginError(f'{where} = "{asked}": {_ambiguous(found)}')
        if named:
            raise PluginError(f'{where} = "{asked}": {" and ".join(self._why_off(entry) for entry in named)}.')
        raise PluginError(self._unknown(group, asked, name, where, expect))

    def resolve(self, group: str, asked: str, *, where: str, expect: type | None = None) -> Resolved:
        """Imports the entry called `asked` and checks it against its group's contract.

        `expect` narrows a group that holds two kinds of driver (AdvantageDriver or ShapingDriver). PluginError as in
        `find`; also if it cannot be imported, was written for another version of the contracts, or is something else.
        """
        # Imported here, so that listing imports neither pydantic nor stevedore nor the contracts.
        from slime_core.registry.validation import validate

        entry = self.find(group, asked, where=where, expect=expect)
        asked_where = f'{where} = "{asked}"'
        started = time.perf_counter()
        loaded = self.load(entry, where=asked_where)
        if self.trace is not None:
            seconds = time.perf_counter() - started
            self.trace(f"load {entry.group} {entry.qualified} {entry.version} {entry.target} {1000 * seconds:.1f} ms")
        return Resolved(entry, validate(entry, loaded, where=asked_where, expect=expect))

    def load(self, entry: Entry, *, where: str) -> Any:
        """The imported object of the entry, unchecked. PluginError names the plugin and chains the cause."""
        from slime_core.registry.loading import load

        if entry in self._objects:
            return self._objects[entry]
        return load(entry, self._points[entry], where=where)

    def _unknown(self, group: str, asked: str, name: str, where: str, expect: type | None) -> str:
        there = self.entries(group)
        noun = groups.NOUNS.get(group, f"name in {group}")
        if expect is not None:
            there = [entry for entry in there if self._is_a(entry, expect)]
            noun = getattr(expect, "noun", "") or noun
        hints = [install_hint(group, name)]
        elsewhere = [e for e in self.entries() if e.name == name and e.group != group and e.group in groups.NOUNS]
        if elsewhere:
            hints.append(
                f'"{name}" is the name of a {" and a ".join(groups.NOUNS[e.group] for e in elsewhere)}'
                f" ({', '.join(dict.fromkeys(e.provenance for e in elsewhere))})"
            )
        return unknown_name(
            where,
            asked,
            noun,
            [*dict.fromkeys(entry.name for entry in there)],
            listing=by_distribution(there),
            hint=". ".join(filter(None, hints)) + ("." if any(hints) else ""),
        )

    def _is_a(self, entry: Entry, expect: type) -> bool:
        """True if the entry's driver is an `expect`. Imports it; False if it cannot be imported."""
        from slime_core.registry.validation import validate

        try:
            validate(entry, self.load(entry, where=entry.group), where=entry.group, expect=expect)
        except PluginError:
            return False
        return True

    def _status(self, entry: Entry) -> Status:
        if self._is_off(entry):
            return Status.OFF
        if entry.is_old:
            return Status.OLD
        if entry.group.startswith("slime.") and entry.group not in groups.NOUNS:
            return Status.UNKNOWN_GROUP
        same = [e for e in self.entries(entry.group) if e.name == entry.name]
        return Status.DUPLICATE if len(same) > 1 and entry.group != groups.HOOKS else Status.OK

    def _is_off(self, entry: Entry) -> bool:
        if entry in self._objects or normalized(entry.dist) == KERNEL:
            return False
        dist = normalized(entry.dist)
        return dist in self.deny or (self.allow is not None and dist not in self.allow)

    def _why_off(self, entry: Entry) -> str:
        if normalized(entry.dist) in self.deny:
            return f"{entry.provenance} offers it, but {DENY_VARIABLE} switches {entry.dist} off"
        return f"{entry.provenance} offers it, but {entry.dist} is not in {ALLOW_VARIABLE}"

    def _distributions(self, named: Collection[str], variable: str) -> tuple[str, ...]:
        known = {normalized(entry.dist) for entry in self._points}
        for name in named:
            if normalized(name) not in known:
                close = near_matches(name, known)
                raise PluginError(
                    f'{variable}: no installed distribution "{name}" offers plugins'
                    f"{'; close match: ' + ', '.join(close) if close else ''}. There are: {', '.join(sorted(known))}."
                )
        return tuple(sorted(normalized(name) for name in named))


def _read(files: Sequence[PluginFile | Path]) -> tuple[PluginFile, ...]:
    # Imported here: it hashes, and loading OpenSSL takes a tenth of the time of a listing.
    from slime_core.registry.plugin_file import PluginFile

    return tuple(file if isinstance(file, PluginFile) else PluginFile.read(file) for file in files)


def _listed(value: str) -> list[str]:
    return [name for part in value.split(",") if (name := part.strip())]


def _ambiguous(found: Sequence[Entry]) -> str:
    dists = {normalized(entry.dist) for entry in found}
    if len(dists) == 1:
        targets = ", ".join(entry.target for entry in found)
        who = found[0]
        return f"{who.provenance} registers it {len(found)} times ({targets}). Upgrade {who.dist}, or uninstall it."
    offered = " and ".join(dict.fromkeys(entry.provenance for entry in found))
    ways = " or ".join(dict.fromkeys(f'"{entry.qualified}"' for entry in found))
    return f"offered by {offered}. Set one of them: {ways}."
