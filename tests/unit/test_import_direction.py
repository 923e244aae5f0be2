"""Knowledge flows one way. A room may import rooms of its own level and of lower ones; type-checking imports are free."""

import ast
from pathlib import Path

import pytest

import slime_core

KERNEL = Path(slime_core.__file__).parent

# The rooms of slime_core, from the lowest level to the highest. A new room is one more word here.
LEVELS = [
    {"__init__", "types", "errors", "groups", "heap", "loop_watch", "process_end", "storage"},
    {"contracts", "hookspecs", "mark", "plugin", "entry", "install_hints"},
    {"registry", "hooks", "config", "plugin_file"},
    {"buffer", "batch", "rollout", "launch", "workers", "checkpoint"}
    | {
        "objective",
        "image_processor",
        "metrics",
        "manifest",
        "model_folder",
        "model_presets",
        "new_model",
        "invariant",
        "new_vision_model",
        "onednn",
        "event_log",
        "footprint",
        "run_folder",
        "schedule",
        "serving",
        "tracking",
        "training",
        "video_reader",
        "weight_files",
    },
    {"loop", "evaluate", "plan"}
    | {
        "engine_folder",
        "engine_specs",
        "engines",
        "group_settings",
        "learner",
        "materials",
        "roles",
        "rollout_only",
        "session",
        "saving",
        "startup",
        "summary",
        "supervision",
        "convert",
    },
    {"cli", "testing"},
]
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def room_of(module):
    """`slime_core.types.batch` is in the room `types`; what slime_core itself holds, in `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "__init__"


def rooms_on_disk():
    return {path.stem if path.is_file() else path.name for path in KERNEL.iterdir() if is_room(path)}


def is_room(path):
    return path.suffix == ".py" or (path.is_dir() and any(path.glob("*.py")))


ROOMS = rooms_on_disk()


def imports_of(source, module, *, is_package):
    """(line, absolute module) of every import of slime_core that runs, wherever it stands."""
    tree = ast.parse(source)
    free = {
        id(inner) for node in ast.walk(tree) if is_type_checking(node) for stmt in node.body for inner in ast.walk(stmt)
    }
    for node in ast.walk(tree):
        if id(node) in free:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, [start, node.module]))
            # `from slime_core import groups` imports a room; `from slime_core import __version__` does not.
            names = [f"{origin}.{alias.name}" for alias in node.names] if origin == "slime_core" else [origin]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "slime_core")


def is_type_checking(node):
    test = node.test if isinstance(node, ast.If) else None
    return getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"


def breaches(source, module, *, is_package=False):
    own = room_of(module)
    return [
        f"{module}:{line}: {own} may not import {name}"
        for line, name in imports_of(source, module, is_package=is_package)
        if LEVEL_OF.get(room_of(name), len(LEVELS)) > LEVEL_OF[own]
    ]


def test_every_room_has_a_level():
    assert not ROOMS - set(LEVEL_OF), "add these rooms to LEVELS"


def test_imports_point_downwards():
    found = []
    for path in sorted(KERNEL.rglob("*.py")):
        parts = ["slime_core", *path.relative_to(KERNEL).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        if room_of(module) in LEVEL_OF:
            found += breaches(path.read_text(), module, is_package=is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "module", "count"),
    [
        ("from slime_core.registry import Registry", "slime_core.contracts.kl", 1),
        ("from slime_core import registry", "slime_core.contracts.kl", 1),
        ("from slime_core import __version__", "slime_core.contracts.kl", 0),
        ("import slime_core.cli.plugins", "slime_core.registry.registry", 1),
        ("def f():\n    from slime_core.cli import plugins", "slime_core.registry.hooks", 1),
        ("from ..registry import Registry", "slime_core.types.batch", 1),
        ("from .batch import Batch", "slime_core.types.sample", 0),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from slime_core.cli import x",
            "slime_core.types.batch",
            0,
        ),
        ("if not TYPE_CHECKING:\n    from slime_core.cli import x", "slime_core.types.batch", 1),
        ("from slime_core.contracts.kl import KlDriver", "slime_core.registry.adapt", 0),
    ],
)
def test_the_walk_would_notice(source, module, count):
    assert len(breaches(source, module)) == count
