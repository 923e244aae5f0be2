"""RunChanges: what differs between the run in a folder and a start, and which of it a user may accept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from slime_core import groups
from slime_core.controller.manifest import MAY_CHANGE, Manifest, deciding_plugins, differing, without

SHOWN: Final = 5
"""Changes that a message names."""


class ChangeKind(StrEnum):
    """What a change is about."""

    CONFIG = "config"
    """A key that decides what is trained: it makes another run."""
    TUNING = "tuning"
    """A key of the same kind that a start may change if it names the run (--resume)."""
    LAYOUT = "layout"
    """Where roles run, and which engines generate: sums are rounded in another order, so a start must name the run too."""
    PLUGINS = "plugins"
    """Versions of plugins, texts of single-file plugins, and what other versions changed in their own tables."""
    DATA = "data"


SERVING: Final = ("engine.", "engines.", "sync.")
"""Where keys of engines and transports begin."""
SERVING_GROUPS: Final = (f"{groups.ENGINES}:", f"{groups.TRANSPORTS}:")

ACCEPTABLE: Final = (ChangeKind.PLUGINS,)
"""Kinds that --accept-changes takes. A position has no meaning in other data, and another key is another training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference."""

    kind: ChangeKind
    what: str
    """Key of the config, distributions, plugin file, or the data."""
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.old} -> {self.new}"


def changes_since(found: Mapping[str, Any], manifest: Manifest) -> list[Change]:
    """The changes from the manifest in a folder to that of a start; empty for the same run."""
    if found["fingerprint"] == manifest.fingerprint:
        return []
    changes = plugin_changes(found, manifest)
    tables = changed_tables(found, manifest)
    may_differ = [".".join(path) for path in manifest.may_differ]
    for key, old, new in differing(without(found["config"], MAY_CHANGE), without(manifest.config, MAY_CHANGE)):
        kind, serves = ChangeKind.CONFIG, key.startswith(SERVING)
        of_version = is_below(key, tables) and names_in(key, old) == names_in(key, new)
        if is_below(key, may_differ) and not (serves and of_version):
            is_layout = serves or key.startswith("launcher.") or "backend." in key
            kind = ChangeKind.LAYOUT if is_layout else ChangeKind.TUNING
        elif of_version:
            kind = ChangeKind.PLUGINS
        changes.append(Change(kind=kind, what=key, old=repr(old), new=repr(new)))
    if found["data"] != manifest.data:
        old, new = (checksum[:12] or "none" for checksum in (found["data"], manifest.data))
        changes.append(Change(kind=ChangeKind.DATA, what="checksum of the training data", old=old, new=new))
    return changes


def plugin_changes(found: Mapping[str, Any], manifest: Manifest) -> list[Change]:
    """One change for all distributions that went from one version to the same other one, and one for each file."""
    dists: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for entry, old, new in differing(entries(found["plugins"]), entries(manifest.plugins)):
        if entry.startswith(SERVING_GROUPS) and None in (old, new):
            # Another engine, which its key reports.
            continue
        dist = entry.partition(":")[2].rpartition("/")[0]
        if dist not in manifest.plugin_files:
            dists[old or "not used", new or "not used"].add(dist)
    named = [(", ".join(sorted(names)), old, new) for (old, new), names in sorted(dists.items())]
    files = differing(found.get("plugin_files", {}), manifest.plugin_files)
    named += [(f"plugin file {name}", (old or "none")[:12], (new or "none")[:12]) for name, old, new in files]
    return [Change(kind=ChangeKind.PLUGINS, what=what, old=old, new=new) for what, old, new in named]


def entries(plugins: Mapping[str, str]) -> dict[str, str]:
    """`group:dist/name` of the plugins that decide the results, to their versions."""
    split = (text.rpartition(" ") for text in deciding_plugins(plugins).values())
    return {entry: version for entry, _, version in split}


def changed_tables(found: Mapping[str, Any], manifest: Manifest) -> set[str]:
    """The tables whose plugin has another version: other versions have other options and defaults."""
    old, new = entries(found["plugins"]), entries(manifest.plugins)
    in_use = {where: text.rpartition(" ")[0] for where, text in deciding_plugins(manifest.plugins).items()}
    return {
        where.rpartition(" ")[0].partition("[")[0]
        for where, entry in in_use.items()
        if entry in old and old[entry] != new[entry]
    }


def is_below(key: str, tables: Sequence[str] | set[str]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def names_in(key: str, value: Any) -> Any:
    """What chooses plugins in the value of a key: another choice is another run, whatever the versions."""
    if key.rpartition(".")[2] == "name":
        return value
    items = value if isinstance(value, list) else [value]
    return [item.get("name") for item in items if isinstance(item, Mapping)]


def list_changes(changes: Sequence[Change]) -> str:
    more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(map(str, changes[:SHOWN])) + more
