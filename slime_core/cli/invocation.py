"""Command line to a bound run: the run file, its flags, the flags of its plugins, and its preparation script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from slime_core.config.bind import bind_run
from slime_core.config.bound import BoundRun
from slime_core.config.chosen import absent_flags, chosen_flags
from slime_core.config.earlier_keys import notices
from slime_core.config.flags import FlagTable, kernel_flags
from slime_core.config.load import merge, read_run_file, validate
from slime_core.config.run import PrepareConfig
from slime_core.contracts.paths import RunPath
from slime_core.errors import ConfigError, PluginError
from slime_core.registry import Registry


@dataclass(frozen=True, slots=True)
class Words:
    """The parsed command line: the run file, the command's own options, and the flags that set keys."""

    file: Path
    own: Mapping[str, str | bool]
    flags: tuple[str, ...]


def parse_words(words: Sequence[str], *, switches: Iterable[str], options: Iterable[str], command: str) -> Words:
    """`switches` and `options` (with a value) belong to the command; the first word ending in .toml is the run file."""
    switches, options = set(switches), set(options)
    own: dict[str, str | bool] = {}
    flags: list[str] = []
    file: Path | None = None
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        name, has_value, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in switches:
            own[name] = True
        elif word.startswith("--") and name in options:
            if not has_value:
                if position == len(words):
                    raise ConfigError(f"--{name} requires a value.")
                value, position = words[position], position + 1
            own[name] = value
        elif file is None and word.endswith(".toml") and not word.startswith("--"):
            file = Path(word)
        else:
            flags.append(word)
    if file is None:
        raise ConfigError(f"no run file given: slime {command} run.toml [--flag value ...]")
    return Words(file, own, tuple(flags))


def bind_invocation(words: Words) -> BoundRun:
    """Everything resolved and checked; nothing heavy imported. ConfigError has all problems."""
    tables = read_run_file(words.file)
    warn(notices(tables, words.flags))
    base = words.file.parent.resolve()
    kernel = kernel_flags()
    # Names first: which flags there are depends on which plugins are chosen.
    named = merge(tables, FlagTable.of(kernel).parse(words.flags, lenient=True))
    registry = Registry.from_environment(plugin_files(named, base), trace=trace)
    absent = cache(lambda: absent_flags(registry))
    known = FlagTable.of([*kernel, *chosen_flags(named, registry)], absent=absent)
    problems: list[str] = []
    try:
        known.parse(words.flags)
    except ConfigError as error:
        problems += error.problems
    try:
        config = validate(merge(tables, known.parse(words.flags, lenient=True)), base=base)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems, *missing_plugin(named, registry)]) from None
    if config.prepare is not None and not problems:
        prepare(config.prepare, base)
    run = bind_run(config, registry, base=base, problems=problems)
    warn(dict.fromkeys(notice for part in run.parts for notice in part.notices()))
    return run


def missing_plugin(named: Mapping[str, Any], registry: Registry) -> list[str]:
    """The error that binding would raise for the first name of an unknown plugin; empty if there is none."""
    try:
        chosen_flags(named, registry, strict=True)
    except PluginError as error:
        return [str(error)]
    return []


def warn(notices: Iterable[str]) -> None:
    for notice in notices:
        print(f"warning: {notice}", file=sys.stderr)


def trace(line: str) -> None:
    print(line, file=sys.stderr)


def plugin_files(tables: Mapping[str, Any], base: Path) -> list[Path]:
    try:
        paths = TypeAdapter(tuple[RunPath, ...]).validate_python(tables.get("plugin", ()), context={"base": base})
    except ValidationError as error:
        raise ConfigError(f"plugin: requires a list of Python files: {error.errors()[0]['msg']}.") from None
    # A file that both the run file and a flag name counts once.
    return list(dict.fromkeys(Path(path) for path in paths))


def prepare(config: PrepareConfig, base: Path) -> None:
    """Runs the script if something that it creates is missing. ConfigError if it fails or leaves something missing."""
    missing = [path for path in config.creates if not Path(path).exists()]
    if not missing:
        return
    script = Path(config.script)
    if not script.is_file():
        raise ConfigError(f"prepare.script = {script}: no such file; it would make {', '.join(missing)}.")
    print(f"preparing: {script.name} makes {', '.join(Path(path).name for path in missing)}", flush=True)
    ended = subprocess.run([sys.executable, str(script), *config.script_arguments], cwd=base, check=False)
    if ended.returncode:
        raise ConfigError(f"prepare.script = {script}: ended with exit code {ended.returncode}; see its output above.")
    if still := [path for path in config.creates if not Path(path).exists()]:
        raise ConfigError(f"prepare.script = {script}: ran, but did not make {', '.join(still)}.")
