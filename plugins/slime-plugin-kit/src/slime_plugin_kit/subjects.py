"""What `--slime-plugin` names: the entry points of an installed distribution, or those of a plugin file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from slime_core import groups
from slime_core.errors import PluginError, near_matches
from slime_core.registry import Registry
from slime_core.registry.entry import Entry, normalized
from slime_plugin_kit.case import Subject


def subjects_of(asked: Sequence[str], here: Path, folder: Path) -> list[Subject]:
    """Every entry point of these distributions and files (paths relative to `here`), each once.

    `folder` takes the files of examples. PluginError, with the installed distributions, if a name is unknown.
    """
    files = [here / name for name in asked if is_file(name)]
    registry = Registry(files)
    entries = [entry for entry in registry.entries() if registry.is_file(entry)]
    for name in asked:
        if not is_file(name):
            entries += entries_of(name, registry)
    under_test = tuple(sorted(dict.fromkeys(entries)))
    return [Subject(entry, registry, folder / str(number), under_test) for number, entry in enumerate(under_test)]


def is_file(asked: str) -> bool:
    return asked.endswith(".py")


def entries_of(dist: str, registry: Registry) -> list[Entry]:
    """What this distribution registers, in slime's groups and in groups of its own."""
    installed = registry.entries()
    found = [entry for entry in installed if entry.is_from(dist) and not registry.is_file(entry)]
    if found:
        return found
    known = {normalized(entry.dist): entry.provenance for entry in installed if not registry.is_file(entry)}
    there = f"Installed, with plugins: {', '.join(sorted(known.values()))}."
    try:
        distribution(dist)
    except PackageNotFoundError:
        close = near_matches(dist, known)
        matched = f"; close match: {', '.join(close)}" if close else ""
        raise PluginError(f'--slime-plugin "{dist}": no such distribution is installed{matched}. {there}') from None
    raise PluginError(
        f'--slime-plugin "{dist}": it is installed and registers nothing: its pyproject.toml has no '
        f'[project.entry-points."{groups.REWARDS}"] or another group of slime\'s, or it was not installed again since. '
        f"{there}"
    )
