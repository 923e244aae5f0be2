"""What is installed, asked of importlib.metadata: it is the truth, and it knows names and versions of distributions."""

from __future__ import annotations

from importlib.metadata import Distribution, EntryPoint, entry_points

from slime_core.registry.entry import Entry, normalized


def installed_entries() -> dict[Entry, EntryPoint]:
    """Every entry of slime's groups and of the groups that plugins declare (`acme_slime.shapes`). Imports nothing."""
    known: dict[Distribution, tuple[str, str]] = {}
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
                known[point.dist] = (point.dist.name, point.dist.version)
            name, version = known[point.dist]
            # An interrupted upgrade leaves a second metadata folder that names the same thing.
            key = (group, point.name, normalized(name), point.value)
            if key not in seen:
                seen.add(key)
                found[Entry(group, point.name, name, version, point.value)] = point
    return found
