"""The commands that are recorded. Commands, plugins and options are read from `slime`; only commands on the demo are listed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from checkout import Checkout
from forked import Forked

DEMO: Final = "examples/arithmetic/run.toml"
OF_SCHEMA: Final = {
    "slime.backends": "--backend",
    "slime.engines": "--engine",
    "slime.algorithms": "--algo",
    "slime.rewards": "--reward",
}


@dataclass(frozen=True)
class Case:
    """A command line, and the file of the recording that has its response."""

    file: str
    words: Sequence[str]


def write(forked: Forked, case: Case, out: Path) -> None:
    ended = forked.run(*case.words)
    path = out / case.file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ended.text())


def standalone(checkout: Checkout, forked: Forked) -> list[Case]:
    """Commands that need no model: the demo may be running meanwhile."""
    return [
        *helps(checkout, forked),
        *of_plugins(forked),
        *(Case(f"mistakes/{name}.txt", ("slime", *words)) for name, words in EARLY_MISTAKES.items()),
        *(Case(f"commands/{name}.txt", ("slime", *words)) for name, words in EARLY.items()),
    ]


def after_the_demo() -> list[Case]:
    return [
        *(Case(f"commands/{name}.txt", ("slime", *words)) for name, words in LATE.items()),
        *(Case(f"mistakes/{name}.txt", ("slime", *words)) for name, words in LATE_MISTAKES.items()),
    ]


def made(work: Path) -> Iterator[str]:
    """Checksums of what commands have written beside the demo."""
    for folder in MADE:
        for path in sorted(path for path in (work / folder).rglob("*") if path.is_file()):
            yield f"{path.relative_to(work)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def helps(checkout: Checkout, forked: Forked) -> Iterator[Case]:
    for script in checkout.scripts():
        yield from walk(forked, (script,))
    yield Case("help/slime (no words).txt", ("slime",))
    yield Case("help/slime run (no words).txt", ("slime", "run"))
    for path in sorted((checkout.work / "examples").glob("*/run.toml")):
        file = path.relative_to(checkout.work)
        yield Case(f"help/slime run {file.parent.name}.txt", ("slime", "run", str(file), "--help"))
    others = ("--backend", "megatron", "--engine", "sglang", "--algo", "ppo")
    yield Case("help/slime run megatron sglang ppo.txt", ("slime", "run", DEMO, *others, "--help"))


def walk(forked: Forked, words: tuple[str, ...]) -> Iterator[Case]:
    """The command's own --help, then those of the commands that it lists."""
    yield Case(f"help/{' '.join(words)}.txt", (*words, "--help"))
    _, found, listed = forked.run(*words, "--help").out.partition("\nCommands:\n")
    if found:
        for name in re.findall(r"^  (\S+)", listed, re.MULTILINE):
            yield from walk(forked, (*words, name))


def of_plugins(forked: Forked) -> Iterator[Case]:
    yield Case("plugins/list.txt", ("slime", "plugins"))
    yield Case("plugins/list as JSON.txt", ("slime", "plugins", "--json"))
    yield Case("plugins/check as JSON.txt", ("slime", "plugins", "--check", "--json"))
    yield Case("plugins/algorithms.txt", ("slime", "plugins", "algorithms"))
    yield Case("config/schema.txt", ("slime", "config", "schema"))
    yield Case("config/explain.txt", ("slime", "config", "explain"))
    for plugin in json.loads(forked.run("slime", "plugins", "--json").out):
        group, name = plugin["group"], plugin["name"]
        yield Case(f"plugins/{group} {name}.txt", ("slime", "plugins", "show", name, "--group", group))
        if group in OF_SCHEMA:
            option = OF_SCHEMA[group]
            yield Case(f"config/schema {option} {name}.txt", ("slime", "config", "schema", option, name))


RUN: Final = ("run", DEMO)
TINY: Final = ("--hidden-size", "32", "--num-layers", "1", "--intermediate-size", "64", "--max-length", "64")

EARLY: Final = {
    "version": ("--version",),
    "explain a key": ("config", "explain", "train.lr"),
    "explain a flag": ("config", "explain", "--rollout-batch-size"),
    "explain an option of a plugin": ("config", "explain", "eps_clip_high"),
    "models list": ("models", "list"),
    "models show": ("models", "show", "qwen3-4B"),
    "new reward": ("new", "reward", "brevity"),
    "new without words": ("new",),
}
"""Commands that take no model."""

LATE: Final = {
    "doctor": ("doctor",),
    "doctor as JSON": ("doctor", "--json"),
    "models new": ("models", "new", "tiny", "--alphabet", "0123456789+= ", *TINY),
    "run --dry-run": (*RUN, "--dry-run"),
    "run --dry-run, ahead": (*RUN, "--dry-run", "--max-async-level", "2", "--partial-rollout", "--algo", "dapo"),
    "run --dry-run, megatron": (*RUN, "--dry-run", "--backend", "megatron"),
    "plan": ("plan", DEMO, "--device-memory", "80GiB"),
    "plan as JSON": ("plan", DEMO, "--device-memory", "80GiB", "--json"),
    "plan for megatron": ("plan", DEMO, "--device-memory", "80GiB", "--json", "--backend", "megatron"),
    "plan that does not fit": ("plan", DEMO, "--device-memory", "1MiB"),
    "eval": ("eval", DEMO),
    "convert to fp8": ("convert", "examples/arithmetic/generated/base", "fp8", "--to", "fp8"),
    "view": ("view", "runs/arithmetic"),
    "view a group": ("view", "runs/arithmetic", "--group", "3456"),
    "view a sample": ("view", "runs/arithmetic", "--sample", "27648"),
}
"""Commands on the demo's model, data and run."""

MADE: Final = ("fp8", "slime-brevity", "tiny")
"""Folders that these commands write."""

EARLY_MISTAKES: Final = {
    "no such command": ("rnu",),
    "no run file": ("run", "--lr", "1e-3"),
    "a run file that is not there": ("run", "nowhere.toml"),
    "no such flag": (*RUN, "--rollout-batch-sise", "3"),
    "a flag of a plugin that is not chosen": (*RUN, "--sglang-servers", "2"),
    "a flag without its value": (*RUN, "--num-rollout"),
    "text for a number": (*RUN, "--lr", "fast"),
    "a number out of range": (*RUN, "--lr", "-1"),
    "not one of the choices": (*RUN, "--on-bad-row", "maybe"),
    "no such plugins": (*RUN, "--backend", "fdsp", "--algo", "gsp0", "--reward", "mth", "--engine", "loacl"),
    "no such launcher": (*RUN, "--launcher", "slurm"),
    "no such source": (*RUN, "--set", "data.source=flies"),
    "no such plugin file": (*RUN, "--plugin", "mine.py"),
    "no such key to explain": ("config", "explain", "train.lrr"),
    "no such plugin to show": ("plugins", "show", "gpro"),
    "no such preset": ("models", "show", "qwen9"),
    "no such run to view": ("view", "runs/nowhere"),
    "convert without words": ("convert", "here", "there"),
    "convert to what is not there": ("convert", "here", "there", "--to", "fp9"),
    "new plugin of no kind": ("new", "rewrad", "brevity"),
}
"""Commands that fail before a model is read."""

LATE_MISTAKES: Final = {
    "a batch that does not divide": (*RUN, "--global-batch-size", "7"),
    "a correction that can do nothing": (*RUN, "--corrections", "tis"),
    "resume of what is not there": (*RUN, "--resume", "runs/nowhere"),
    "resume of another run": (*RUN, "--resume", "runs/arithmetic"),
    "fresh and resume": (*RUN, "--fresh", "--resume", "runs/arithmetic"),
    "a checkpoint of no step": (*RUN, "--name", "other", "--ckpt-step", "4"),
    "a model that is not there": (*RUN, "--hf-checkpoint", "nowhere"),
    "data that is not there": (*RUN, "--prompt-data", "nowhere.jsonl"),
    "a key that no row has": (*RUN, "--input-key", "question"),
    "no device of that name": (*RUN, "--device", "cuda"),
    "view of a group that is not there": ("view", "runs/arithmetic", "--group", "999999"),
}
