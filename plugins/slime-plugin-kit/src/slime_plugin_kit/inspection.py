"""The check behind `slime plugins --check`: imports every entry and validates its contract."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from typing import Any, Final

from packaging.requirements import Requirement
from pydantic import ValidationError
from typer import Typer

from slime_core import __version__, groups
from slime_core.cli.commands import CommandGroup, command_problem
from slime_core.cli.main import app
from slime_core.cli.plugins import PluginsGroup
from slime_core.config.roles import LOSS_KEYS
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.driver import Driver, DriverConfig
from slime_core.errors import PluginError, near_matches
from slime_core.registry.adapt import is_plain
from slime_core.registry.entry import KERNEL, Entry, normalized
from slime_core.registry.hooks import Hooks
from slime_core.registry.loading import old_kernel_problem
from slime_core.registry.mark import NAME_PATTERN
from slime_core.registry.registry import Registry, Status
from slime_core.registry.validation import validate

HEAVY_MODULES: Final = frozenset(
    {
        "datasets",
        "deepspeed",
        "flash_attn",
        "jax",
        "megatron",
        "ray",
        "sglang",
        "sglang_router",
        "tensorflow",
        "torch",
        "transformer_engine",
        "transformers",
        "vllm",
    }
)
"""What the module that an entry point names may not import: only `build` may."""
IMPORT_TIMEOUT_S: Final = 120
IMPORT_PROBE: Final = """
import importlib, json, os, sys
sys.path[:], dists, heavy = json.loads(sys.argv[1])
at_start = set(sys.modules)
# What all of them import takes longer than all the rest.
importlib.import_module("slime_core.contracts.driver")
found = []
for modules in dists:
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        there, of_dist = at_start, {}
        for name in modules:
            try:
                importlib.import_module(name)
                of_dist[name] = sorted({m.partition(".")[0] for m in set(sys.modules) - there} & set(heavy))
            except BaseException:
                pass  # reported by the check in process
            there = set(sys.modules)
        os.write(write_end, json.dumps(of_dist).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end) as lines:
        # A plugin that ends the interpreter at import is reported by the check in process.
        found.append(json.loads(lines.read() or "{}"))
    os.wait()
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    entry: Entry
    status: Status
    problems: tuple[str, ...] = ()


def inspect_entries(registry: Registry, only: Collection[Entry] | None = None) -> list[Finding]:
    """One finding per entry (of `only`, if given), in the order of the listing; entries that are switched off are not
    imported."""
    listing = [(entry, status) for entry, status in registry.listing() if only is None or entry in only]
    active = [entry for entry, status in listing if status not in (Status.OFF, Status.OLD)]
    heavy = _heavy_imports(registry, active)
    return [
        Finding(entry, status, () if status is Status.OFF else tuple(_problems(registry, entry, status, heavy)))
        for entry, status in listing
    ]


def _problems(registry: Registry, entry: Entry, status: Status, heavy: Mapping[Entry, Sequence[str]]) -> Iterable[str]:
    if status is Status.OLD:
        yield old_kernel_problem(entry)
        return
    if status is Status.UNKNOWN_GROUP:
        close = near_matches(entry.group, groups.NOUNS)
        yield f"nothing reads the group {entry.group}{'; close match: ' + close[0] if close else ''}"
        return
    if not NAME_PATTERN.fullmatch(entry.name.rpartition(".")[2] if entry.group == groups.COMMANDS else entry.name):
        yield f'"{entry.name}" is not a name that users can type: letters, digits, - and _'
    twins = [e for e in registry.entries(entry.group) if e.name == entry.name and e.is_from(entry.dist)]
    if len(twins) > 1:
        yield f"{entry.dist} registers the name {len(twins)} times: {', '.join(twin.target for twin in twins)}"
    if normalized(entry.dist) != KERNEL and not registry.is_file(entry):
        yield from requirement_problems(entry.dist)
    if heavy.get(entry):
        yield f"importing {entry.module} imports {', '.join(heavy[entry])}: move that into build()"
    try:
        loaded = registry.load(entry, where=entry.qualified)
        if entry.group == groups.HOOKS:
            Hooks({entry.qualified: loaded})
            return
        if entry.group == groups.COMMANDS:
            yield from command_problems(registry, entry, loaded)
            return
        accepted = validate(entry, loaded, where=entry.qualified)
    except PluginError as error:
        yield str(error)
        return
    if isinstance(accepted, Recipe):
        yield from recipe_problems(registry, accepted)
    elif isinstance(accepted, type) and issubclass(accepted, Driver) and not is_plain(entry.group, loaded):
        yield from driver_problems(accepted)


def command_problems(registry: Registry, entry: Entry, loaded: object) -> Iterable[str]:
    """What `slime` cannot run, or never looks at."""
    parents = [group.parent for group in (CommandGroup, PluginsGroup)]
    parent = entry.name.rpartition(".")[0]
    if parent not in parents and not any(
        is_group(registry.load(of, where=of.qualified), parent)
        for of in registry.entries(groups.COMMANDS)
        if of.name == parent
    ):
        yield f"nothing reads the command {entry.name}: there is {' and '.join(f'{p}.NAME'.strip('.') for p in parents)}"
    kernels = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    if entry.name in kernels:
        yield f"{KERNEL} has a command {entry.name}: give it another name"
    if problem := command_problem(entry, loaded):
        yield problem


def is_group(command: object, parent: str) -> bool:
    """Whether this command of a plugin has the entries below `parent` as its own commands."""
    group = command.info.cls if isinstance(command, Typer) else None
    return isinstance(group, type) and issubclass(group, CommandGroup) and group.parent == parent


def driver_problems(driver: type[Driver[Any]]) -> Iterable[str]:
    """Everything about a driver class, beyond its kind, that its contract asks for and that it lacks."""
    config: type = driver.Config
    if not (isinstance(config, type) and issubclass(config, DriverConfig)):
        yield f"{driver.__name__}.Config is not a subclass of slime_core.contracts.driver.DriverConfig"
        return
    if config.model_config.get("extra") != "forbid":
        yield f'{config.__qualname__} does not forbid unknown options: keep extra="forbid"'
    if not config.model_config.get("frozen"):
        yield f"{config.__qualname__} is not frozen: keep frozen=True"
    undocumented = [name for name, field in config.model_fields.items() if not (field.description or "").strip()]
    if undocumented:
        yield f"{config.__qualname__} has no docstring under {', '.join(undocumented)}"
    if all(not field.is_required() for field in config.model_fields.values()):
        yield from _round_trip_problems(config)


def recipe_problems(registry: Registry, recipe: Recipe) -> Iterable[str]:
    """Parts that a recipe names and no plugin registers, and texts that it lacks."""
    for name in ("summary", "paper"):
        if not getattr(recipe, name).strip():
            yield f"the recipe's {name} is empty"
    parts = [
        *(() if recipe.advantage is None else ((groups.ADVANTAGES, "advantage", recipe.advantage),)),
        *(() if recipe.collector is None else ((groups.COLLECTORS, "collector", recipe.collector),)),
        (groups.LOSSES, "loss", recipe.loss),
        *((groups.ADVANTAGES, "shaping", name) for name in recipe.shaping),
        *((groups.CORRECTIONS, "corrections", name) for name in recipe.corrections),
        *((groups.FILTERS, "filters", name) for name in recipe.filters),
    ]
    for role in recipe.roles:
        key = LOSS_KEYS.get(role)
        if key is None:
            yield f'the recipe trains a role "{role}"; there is {", ".join(LOSS_KEYS)}'
        elif key not in recipe.options:
            yield f"the recipe trains a {role}, and its options have no {key}"
        else:
            parts.append((groups.LOSSES, key, recipe.options[key]))
    for group, where, name in parts:
        try:
            registry.find(group, name, where=where)
        except PluginError as error:
            yield str(error)


def _round_trip_problems(config: type[DriverConfig]) -> Iterable[str]:
    try:
        defaults = config()
    except ValidationError:
        return  # a rule over several options asks for one of them
    try:
        restored = config.model_validate_json(defaults.model_dump_json(warnings="error"))
    # pydantic's validation and serialization errors are ValueErrors.
    except ValueError as error:
        yield f"the defaults of {config.__qualname__} do not survive JSON: {' '.join(str(error).split())}"
        return
    if restored != defaults:
        yield f"the defaults of {config.__qualname__} come back from JSON as {restored!r}"


def requirement_problems(dist: str) -> Iterable[str]:
    """Problems of the requirement on slime-rl, which a distribution must declare so that pip installs matching versions."""
    stated = [Requirement(text) for text in requires(dist) or ()]
    kernel = [requirement for requirement in stated if normalized(requirement.name) == KERNEL]
    if not kernel:
        yield f'{dist} does not depend on {KERNEL}: add a range, such as "{KERNEL}>={__version__},<1"'
    for requirement in kernel:
        if not requirement.specifier.contains(__version__, prereleases=True):
            yield f"{dist} asks for {requirement}, but {KERNEL} {__version__} is installed: upgrade one of them"


def _heavy_imports(registry: Registry, entries: Sequence[Entry]) -> dict[Entry, Sequence[str]]:
    """Heavy modules that an entry's module imports, found in a fresh interpreter, which forks for each
    distribution. Plugin files may import what they like."""
    by_dist: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not registry.is_file(entry):
            by_dist[normalized(entry.dist)].append(entry)
    dists = [[*dict.fromkeys(entry.module for entry in members)] for members in by_dist.values()]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE, json.dumps([sys.path, dists, sorted(HEAVY_MODULES)])],
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S * max(1, len(dists)),
        check=True,
    )
    responses = json.loads(done.stdout.splitlines()[-1])
    return {
        entry: read_end.get(entry.module, ())
        for read_end, members in zip(responses, by_dist.values(), strict=True)
        for entry in members
    }
