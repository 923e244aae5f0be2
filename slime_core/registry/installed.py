"""Installed entry points, read by importlib.metadata, which also has the names and versions of distributions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, entry_points

from slime_core.registry.entry import KERNEL, OLD_KERNEL, Entry, normalized


def installed_entries() -> dict[Entry, EntryPoint]:
    """Every entry of slime's groups and of the groups that plugins declare (`acme_slime.shapes`). Imports nothing."""
    known: dict[Distribution, tuple[str, str, bool]] = {}
    found: dict[Entry, EntryPoint] = {}
    seen: set[tuple[str, str, str, str]] = set()
    points = entry_points()
    for group in points.groups:
        if "slime" not in group.partition(".")[0]:
            continue
        for point in points.select(group=group):
            assert point.dist is not None
            if point.dist not in known:
                # Reading it parses the whole METADATA file.
                metadata = point.dist.metadata
                is_old = requires_old_kernel(metadata.get_all("Requires-Dist") or ())
                known[point.dist] = (metadata["Name"], metadata["Version"], is_old)
            name, version, is_old = known[point.dist]
            # An interrupted upgrade leaves a second metadata folder that names the same thing.
            key = (group, point.name, normalized(name), point.value)
            if key not in seen:
                seen.add(key)
                found[Entry(group, point.name, name, version, point.value, is_old)] = point
    return found


def requires_old_kernel(requirements: Iterable[str]) -> bool:
    """True if the kernel is required under its old name only; requirements of extras do not count."""
    always = [text for text in requirements if "extra" not in text.partition(";")[2]]
    named = {normalized(found[0]) for text in always if (found := re.match(r"[\w.-]+", text))}
    return OLD_KERNEL in named and KERNEL not in named
