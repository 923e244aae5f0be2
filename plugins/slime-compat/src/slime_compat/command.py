"""The command `slime-compat`: translates a launch line into a run file."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tomlkit

from slime_compat.launch_line import LaunchLine, from_script, from_words
from slime_compat.rules.order import apply
from slime_compat.translation import Note, Translation
from slime_core.config.run import RunConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.registry import Registry

USAGE: Final = (
    "slime-compat translate [--lenient] [--backend B] [--engine E] (SCRIPT.sh [ARGUMENT ...] | -- python3 train.py ...)"
)
LEFT_OUT_CODE: Final = 9


def main(words: Sequence[str] | None = None) -> None:
    """The console script."""
    try:
        sys.exit(translate(list(sys.argv[1:] if words is None else words)))
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def translate(words: list[str]) -> int:
    """Prints the run file, and the notes on stderr. Returns the exit code."""
    own, line_words = split_at(words, "--")
    parser = argparse.ArgumentParser(prog="slime-compat", usage=USAGE, description=__doc__)
    parser.add_argument("command", choices=["translate"], help="print the run file that a launch line becomes")
    parser.add_argument("--lenient", action="store_true", help="exit code 0 even if the run would train differently")
    parser.add_argument("--backend", help="training backend in place of the line's, such as fsdp")
    parser.add_argument("--engine", default="sglang", help="rollout engine in place of sglang, such as local")
    parser.add_argument("script", nargs="*", help="launch script, and its arguments")
    typed = parser.parse_intermixed_args(own)
    line = launch_line(typed.script, line_words)
    seed = "".join(value_of(line.words, "--backend")[-1:])
    backend = typed.backend or "".join(value_of(line.words, "--train-backend")[-1:]) or seed or "megatron"
    translation = Translation(line, Registry.from_environment(), backend, typed.engine)
    translation.done |= {"train-backend", "backend"}
    apply(translation)
    source = typed.script[0] if typed.script else shlex.join(["python3", line.entry, "..."])
    print(run_file(translation.tables, source), end="")
    report(translation.notes)
    return LEFT_OUT_CODE if any(note.trains for note in translation.notes) and not typed.lenient else 0


def launch_line(script: Sequence[str], words: Sequence[str] | None) -> LaunchLine:
    if (words is None) == (not script):
        raise ConfigError(f"pass either a script or a launch line after --: {USAGE}")
    if words is None:
        return from_script(Path(script[0]), script[1:])
    line = from_words(words)
    if line is None:
        raise ConfigError(f"the launch line after -- starts no train.py or train_async.py: {shlex.join(words)}")
    return line


def split_at(words: list[str], mark: str) -> tuple[list[str], list[str] | None]:
    if mark not in words:
        return words, None
    at = words.index(mark)
    return words[:at], words[at + 1 :]


def value_of(words: Sequence[str], flag: str) -> list[str]:
    """The values of a flag, one for each use."""
    behind = [following for word, following in itertools.pairwise(words) if word == flag]
    return behind + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def run_file(tables: dict[str, Any], source: str) -> str:
    """Returns the run file as TOML, its tables in the order of RunConfig."""
    order = list(RunConfig.model_fields)
    document = tomlkit.document()
    document.add(tomlkit.comment(f"From {source}, by slime-compat."))
    # Plain keys come before tables: after a table they would belong to it.
    keys = sorted(tables, key=lambda key: (isinstance(tables[key], dict), order.index(key)))
    for key in keys:
        value = tables[key]
        if isinstance(value, dict) and set(value) == {"name"}:
            value = value["name"]
        document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document).rstrip() + "\n"


def report(notes: Sequence[Note]) -> None:
    """Prints the notes, those that change the training first."""
    if not notes:
        return
    print("left out of the run file, or changed:", file=sys.stderr)
    for note in sorted(notes, key=lambda note: not note.trains):
        mark = "CHANGES THE TRAINING  " if note.trains else ""
        flag = note.flag if " " in note.flag else f"--{note.flag}"
        print(f"  {mark}{flag}: {note.text}", file=sys.stderr)
