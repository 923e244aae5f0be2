"""Entry: one name that a distribution (or a plugin file) registers in an entry-point group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

KERNEL: Final = "slime-rl"
"""The kernel's own distribution."""
OLD_KERNEL: Final = "slime-core"
"""Its name until 0.1. On PyPI that is another project's."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """Sorts by group, name, distribution. Nothing has been imported to make it."""

    group: str
    name: str
    dist: str
    """Name of the distribution; for a plugin file, the file's name."""
    version: str
    """Version of the distribution; for a plugin file, the start of its sha256."""
    target: str
    """`module:attribute`, or `module` alone."""
    is_old: bool = field(default=False, compare=False)
    """True if the distribution requires `slime-core`, as those built for 0.1 do."""

    @property
    def qualified(self) -> str:
        """`dist/name`: what to write where the name alone is ambiguous."""
        return f"{self.dist}/{self.name}"

    @property
    def provenance(self) -> str:
        return f"{self.dist} {self.version}"

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def is_from(self, dist: str) -> bool:
        return normalized(self.dist) == normalized(dist)


def normalized(dist: str) -> str:
    """One spelling of a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def by_distribution(entries: Iterable[Entry]) -> str:
    """`a, b (acme-slime 0.1.0); c (other 2.0)`"""
    ordered = sorted(entries, key=lambda entry: (entry.provenance, entry.name))
    return "; ".join(
        f"{', '.join(dict.fromkeys(entry.name for entry in group))} ({provenance})"
        for provenance, group in groupby(ordered, key=lambda entry: entry.provenance)
    )
