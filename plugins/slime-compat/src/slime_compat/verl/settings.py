"""VerlSettings: the keys that a YAML file, a command line with overrides, or a launch script sets."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from slime_compat.launch_line import LaunchLine, from_script, of_runtime_env
from slime_core.errors import ConfigError

ENTRY: Final = "main_ppo"
MODULE: Final = f"verl.trainer.{ENTRY}"
EXAMPLE: Final = f"python3 -m {MODULE} KEY=VALUE ..."
OVERRIDE: Final = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.\-/@]*)=(.*)", re.DOTALL)
REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
"""`${data.train_batch_size}`."""
OWN_CONFIGS: Final = ("ppo_trainer", "ppo_megatron_trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlSettings:
    given: Mapping[str, Any]
    """Dotted key -> value. References to other keys are resolved if these are set."""
    source: str
    """What was read, in short."""
    folder: Path
    """In which a launch script's relative paths of Python files are looked up."""
    megatron: bool
    """Whether verl's configuration for Megatron is the base."""
    missing_config: str = ""
    """A configuration file that the command line names and that is not there."""


def read(words: Sequence[str]) -> VerlSettings:
    """The settings in a YAML file, a script or a command line. ConfigError if they cannot be read."""
    line = from_words(words)
    if line is not None:
        return of_line(line, shlex.join(["python3", "-m", line.entry, "..."]), Path())
    if len(words) > 1 and not Path(words[0]).is_file():
        raise ConfigError(
            f"{shlex.join(words)}: neither a file nor a line that starts {MODULE}. Type slime compat verl CONFIG.yaml, "
            f"slime compat verl SCRIPT.sh, or slime compat verl -- {EXAMPLE}"
        )
    path = Path(words[0])
    if path.suffix in (".yaml", ".yml"):
        keys = of_file(path)
        megatron = keys.get("actor_rollout_ref.actor.strategy") == "megatron"
        return VerlSettings(given=resolved(keys), source=words[0], folder=path.parent, megatron=megatron)
    line = from_script(path, words[1:], reader=from_words, started=MODULE, example=EXAMPLE)
    return of_line(line, words[0], path.parent)


def from_words(words: Sequence[str], python_path: str = "") -> LaunchLine | None:
    """The launch line in these words, behind any wrappers. None if they start another program."""
    for at, word in enumerate(words):
        if word == MODULE or Path(word).name == f"{ENTRY}.py":
            folders = [*python_path.split(":"), *of_runtime_env(words[:at])]
            return LaunchLine(
                entry=word,
                words=tuple(words[at + 1 :]),
                python_path=tuple(dict.fromkeys(folder for folder in folders if folder)),
            )
    return None


def of_line(line: LaunchLine, source: str, folder: Path) -> VerlSettings:
    name = option(line.words, "--config-name").removesuffix(".yaml")
    base: dict[str, Any] = {}
    missing = ""
    if name and name not in OWN_CONFIGS:
        config = Path(option(line.words, "--config-path") or ".", f"{name}.yaml")
        found = [path for path in (config, folder / config) if path.is_file()]
        base = of_file(found[0]) if found else {}
        missing = "" if found else str(config)
    given = base | dict(overrides(line.words))
    megatron = name == OWN_CONFIGS[1] or given.get("actor_rollout_ref.actor.strategy") == "megatron"
    return VerlSettings(given=resolved(given), source=source, folder=folder, megatron=megatron, missing_config=missing)


def option(words: Sequence[str], name: str) -> str:
    """The last value of an option of Hydra's; empty if it is not set."""
    values = [following for word, following in itertools.pairwise(words) if word == name]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    return values[-1] if values else ""


def overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields the keys of Hydra's overrides: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE. ~KEY=VALUE deletes the key."""
    for word in words:
        found = OVERRIDE.fullmatch(word)
        if found and found[1] != "~":
            yield from flat(value_of(found[3]), found[2])


def value_of(text: str) -> Any:
    """An override's value. Text that is no YAML stays text."""
    try:
        return yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text


def of_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must contain a mapping of keys to values.")
    loaded = {key: value for key, value in loaded.items() if key not in ("defaults", "hydra")}
    return dict(flat(loaded))


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings under dotted keys."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces references to keys that are set. Keys with other interpolations are left out: their values are verl's."""
    found = {key: with_references(value, given) for key, value in given.items()}
    return {key: value for key, value in found.items() if not (isinstance(value, str) and "${" in value)}


def with_references(value: Any, given: Mapping[str, Any], depth: int = 8) -> Any:
    if not isinstance(value, str) or not depth:
        return value
    whole = REFERENCE.fullmatch(value)
    if whole and whole[1] in given:
        return with_references(given[whole[1]], given, depth - 1)
    return REFERENCE.sub(
        lambda found: str(with_references(given[found[1]], given, depth - 1)) if found[1] in given else found[0], value
    )
