"""PeerTranslation: the tables and notes that the configuration of another trainer becomes.

Rules read the keys that they know, set or not: a peer's defaults that differ from slime's are written into the run file, so
that the training stays the same. The keys that no rule has read are looked up in a table of those without a counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

from slime_compat.flag_words import N, guess, number
from slime_compat.notes import Note
from slime_core.errors import near_matches

D = TypeVar("D")

MEMORY_SHARES: Final = {"sglang": "mem_fraction_static", "vllm": "gpu_memory_utilization"}
"""Engine to its option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """Keys of a peer that have no counterpart here."""

    keys: str
    """Names, or patterns in which * matches anything, separated by spaces."""
    why: str
    trains: bool = False
    """Whether leaving them out may change the training."""
    harmless: tuple[Any, ...] = (None, False, "")
    """Values with which the key has no effect in the peer either: no note is made."""

    def has(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self.keys.split())


@dataclass(slots=True, kw_only=True)
class PeerTranslation:
    """`tables` and `notes` are the result."""

    given: Mapping[str, Any]
    """The keys that the configuration sets."""
    defaults: Mapping[str, Any]
    """The peer's defaults of the keys that rules read."""
    backend: str
    engine: str
    tables: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    """Keys that a rule has read."""

    def put_memory_share(self, share: float) -> None:
        """The engine's share of GPU memory, under its own name."""
        if (option := MEMORY_SHARES.get(self.engine)) is not None:
            self.put(f"engine.{option}", share)

    def value(self, key: str) -> Any:
        """The value of a key, or the peer's default."""
        self.read.add(key)
        value = self.given.get(key, self.defaults.get(key))
        return guess(value) if isinstance(value, str) else value

    def text(self, key: str) -> str:
        """The value as text; empty for none."""
        self.read.add(key)
        value = self.given.get(key, self.defaults.get(key))
        return "" if value is None else str(value)

    def number(self, key: str, kind: type[N]) -> N:
        """The value as a number; the peer's default with a note if it is none."""
        value = self.value(key)
        try:
            if isinstance(value, bool):
                raise ValueError(f'"{value}": must be a number')
            return number(str(value), kind)
        except ValueError as error:
            # 1e3 and 4.0 are integers to a reader of YAML.
            if kind is int and isinstance(value, float) and value.is_integer():
                return kind(value)
            self.note(key, f"{error}; {self.defaults[key]} is used", trains=True)
            return kind(self.defaults[key])

    def switch(self, key: str) -> bool:
        return self.value(key) is True

    def put(self, path: str, value: Any) -> None:
        table = self.tables
        *outer, last = path.split(".")
        for key in outer:
            table = table.setdefault(key, {})
        table[last] = value

    def get(self, path: str) -> Any:
        """A value that a rule has put; None if none has."""
        table: Any = self.tables
        for key in path.split("."):
            table = table.get(key) if isinstance(table, dict) else None
        return table

    def note(self, key: str, text: str, *, trains: bool = False) -> None:
        self.notes.append(Note(key, text, trains))

    def unused(self, rows: Sequence[Unused]) -> None:
        """Notes on the keys that no rule has read: one for all keys of a row, and one for each key that no row has."""
        found: dict[int, list[str]] = {}
        for key in sorted(set(self.given) - self.read):
            at = next((at for at, row in enumerate(rows) if row.has(key)), None)
            if at is None:
                close = near_matches(key, [*self.read, *self.defaults])
                self.note(key, "unknown key" + (f"; close match: {', '.join(close)}" if close else ""), trains=True)
            elif not (
                self.value(key) in rows[at].harmless or (key in self.defaults and self.given[key] == self.defaults[key])
            ):
                found.setdefault(at, []).append(key)
        for at, keys in found.items():
            self.note(", ".join(keys), rows[at].why, trains=rows[at].trains)
