"""A run file and flags to a RunConfig. All problems are reported at once, with the path that the user typed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from slime_core.config.earlier_keys import current_path, current_tables, current_value
from slime_core.config.flags import AddedList, bare_type
from slime_core.config.run import RunConfig
from slime_core.errors import ConfigError
from slime_core.registry.options import problem_line


def read_run_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML run file. ConfigError names the file, and line and column of a syntax error."""
    try:
        # Some editors begin a file with a byte order mark.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        beside = sorted(str(p) for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        there = f" There is: {', '.join(beside[:5])}." if beside else ""
        raise ConfigError(f"{path}: no such run file.{there}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: arrays or tables are nested too deep.") from None


def merge(tables: Mapping[str, Any], overrides: Iterable[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """`tables` with each (path, value) set. A table written as a plain name grows into one; giving a table another
    `name` drops the options of the old one. An AddedList comes after the list that is there."""
    result = current_tables(tables)
    # Names first, or an option that was typed before its table's name would be dropped with the old ones.
    for typed, value in sorted(overrides, key=lambda override: override[0][-1] != "name"):
        path = current_path(typed)
        table = result
        for depth, key in enumerate(path[:-1]):
            inner = table.get(key)
            if not isinstance(inner, Mapping | str | None):
                where = ".".join(path[: depth + 1])
                raise ConfigError(f"{'.'.join(path)}: {where} is not a table; set {where} as a whole.")
            table[key] = {"name": inner} if isinstance(inner, str) else dict(inner or {})
            table = table[key]
        if path[-1] == "name" and table.get("name", value) != value:
            for key in options_of(path[:-1], table):
                del table[key]
        there = table.get(path[-1])
        if isinstance(value, AddedList) and isinstance(there, list):
            value = [*there, *value]
        table[path[-1]] = current_value(path, value)
    return result


def options_of(path: Sequence[str], table: Mapping[str, Any]) -> set[str]:
    """The keys of the table at `path` that are options of what its name chooses, not the kernel's own."""
    owner: Any = RunConfig
    for key in path:
        info = owner.model_fields.get(key)
        owner = None if info is None else bare_type(info.annotation)
        if not (isinstance(owner, type) and issubclass(owner, BaseModel)):
            return set(table)
    return table.keys() - owner.model_fields.keys() if owner.model_config.get("extra") == "allow" else set()


def validate(tables: Mapping[str, Any], *, base: Path) -> RunConfig:
    """The RunConfig of these tables; relative paths in them are relative to `base`."""
    try:
        return RunConfig.model_validate(tables, context={"base": base})
    except ValidationError as error:
        raise ConfigError([problem_line(e, RunConfig, tables, "slime", "") for e in error.errors()]) from None
