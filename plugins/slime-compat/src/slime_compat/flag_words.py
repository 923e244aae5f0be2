"""Splits the words of a launch line into flags and values, and converts values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml  # type: ignore[import-untyped]

from slime_core.config.flags import Flag, bare_type, takes_many
from slime_core.errors import ConfigError

N = TypeVar("N", int, float)


def flag_words(words: Sequence[str], note: Callable[..., None]) -> Iterator[tuple[str, list[str]]]:
    """Yields each flag with its values."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if not word.startswith("--"):
            if name is None:
                note(word, "unexpected word; flags start with --", trains=True)
            values.append(word)
            continue
        if name is not None:
            yield name, values
        name, has_value, value = word[2:].partition("=")
        name, values = name.replace("_", "-"), [value] if has_value else []
    if name is not None:
        yield name, values


def custom_config(files: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields the keys of the files as flags, which override the flags of the line. ConfigError if a file cannot be read."""
    for file in files:
        try:
            keys = yaml.safe_load(Path(file).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--custom-config-path {file}: {error}") from error
        if not isinstance(keys, dict):
            raise ConfigError(f"--custom-config-path {file}: must contain a mapping of keys to values.")
        for key, value in keys.items():
            name = str(key).replace("_", "-")
            if isinstance(value, list):
                yield name, [str(item) for item in value]
            elif value is True:
                yield name, []
            elif value is not None:
                yield name, [str(value)]


def typed_as(flag: Flag, word: str) -> Any:
    """The word converted to the type of the flag's key. ValueError if it cannot be converted."""
    bare = bare_type(flag.field.annotation)
    inner = bare_type(get_args(bare)[0]) if takes_many(bare) else bare
    if inner not in (int, float):
        return word
    return number(word, inner)


def number(word: str, kind: type[N]) -> N:
    """The word as a number. ValueError if it is not one."""
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f'"{word}": must be a number') from None


def guess(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(word.lower(), word)


def guessed(words: Sequence[str]) -> Any:
    """Converts values without a known type: True for a switch, else a value or a list of values."""
    if not words:
        return True
    return guess(words[0]) if len(words) == 1 else [guess(word) for word in words]
