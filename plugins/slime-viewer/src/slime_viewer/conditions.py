"""Conditions: what `where` means: `reward<0.5 status=truncated part:format=0`, joined by spaces."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from slime_core.errors import ConfigError, near_matches

OPERATORS: Final = {"<=": "<=", ">=": ">=", "!=": "<>", "<": "<", ">": ">", "=": "="}
_CONDITION: Final = re.compile(r"(?P<name>[^<>=!]+)(?P<operator><=|>=|!=|<|>|=)(?P<value>.+)", re.DOTALL)

TEXTS: Final = frozenset({"status"})


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def where_clause(text: str, known: Mapping[str, str]) -> tuple[str, list[float | str]]:
    """SQL with its parameters; `TRUE` without conditions. `known`: columns by the name that conditions have for them.
    ConfigError, with what there is, for anything else."""
    conditions: list[str] = []
    values: list[float | str] = []
    for word in text.split():
        found = _CONDITION.fullmatch(word)
        if found is None:
            raise ConfigError(f"where: {word!r} is no condition; write NAME<VALUE, with one of {' '.join(OPERATORS)}.")
        name, value = found["name"], found["value"]
        if name not in known:
            raise ConfigError(unknown_column("where", name, known))
        if name not in TEXTS:
            try:
                values.append(float(value))
            except ValueError:
                raise ConfigError(f"where: {word!r}: {value!r} is no number.") from None
        elif found["operator"] in ("=", "!="):
            values.append(value)
        else:
            raise ConfigError(f"where: {word!r}: {name} is a text; write {name}=VALUE or {name}!=VALUE.")
        conditions.append(f"{quoted(known[name])} {OPERATORS[found['operator']]} ?")
    return " AND ".join(conditions) or "TRUE", values


def unknown_column(what: str, name: str, known: Collection[str]) -> str:
    close = near_matches(name, known)
    hint = f"; close match: {', '.join(close)}" if close else ""
    return f"{what}: nothing here is called {name!r}{hint}. There are: {', '.join(sorted(known))}."
