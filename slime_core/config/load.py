"""A run file and flags to a RunConfig. All problems are reported at once, with the path that the user typed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slime_core.config.run import RunConfig
from slime_core.errors import ConfigError
from slime_core.registry.options import problem_line


def read_run_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML run file. ConfigError names the file, and line and column of a syntax error."""
    try:
        text = path.read_text(encoding="utf-8")
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


def merge(tables: Mapping[str, Any], overrides: Iterable[tuple[Sequence[str], Any]]) -> dict[str, Any]:
    """`tables` with each (path, value) set. A table written as a plain name grows into one; giving a table another
    `name` drops the options that stood beside the old one."""
    result = dict(tables)
    for path, value in overrides:
        table = result
        for key in path[:-1]:
            inner = table.get(key)
            table[key] = {"name": inner} if isinstance(inner, str) else dict(inner or {})
            table = table[key]
        if path[-1] == "name" and table.get("name", value) != value:
            table.clear()
        table[path[-1]] = value
    return result


def validate(tables: Mapping[str, Any], *, base: Path) -> RunConfig:
    """The RunConfig of these tables; relative paths in them are relative to `base`."""
    try:
        return RunConfig.model_validate(tables, context={"base": base})
    except ValidationError as error:
        raise ConfigError([problem_line(e, RunConfig, tables, "slime", "") for e in error.errors()]) from None
