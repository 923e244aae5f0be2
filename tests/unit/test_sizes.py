"""Limits on the size of the kernel, its packages, classes and functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KERNEL_LINES: Final = 21_100
FUNCTION_LINES: Final = 60
CLASS_LINES: Final = 250
TOP_MODULES: Final = {"__init__", "errors", "groups", "plugin", "testing"}
"""Of at most six beside the kernel's packages."""

LARGE_CLASSES: Final = {
    "EngineClient": "one queue of requests over engines that come and go: its state is one",
    "Session": "the verbs of a run over one state, most of them a few lines",
    "OwnLoop": "the calls of a loop of one's own, over one record of its gradients and steps",
    "RayLauncher": "the launcher contract over one cluster",
    "FsdpBackend": "the backend contract over one trainer: a method for each call",
    "ServingEngine": "the engine contract over a program's servers: a method for each call",
    "LocalEngine": "the engine contract over one task that runs the decoders: a method for each call",
    "TrainingSession": "the calls of a loop of one's own: a docstring and a line each",
    "Endpoints": "the endpoints of an API that is given: a few lines each",
    "Training": "a model's requests: what each kind does, over one record of what is in the trainers",
    "MegatronBackend": "the backend contract over one trainer: a method for each call",
}
"""Class to why it is not two."""


def sources() -> list[Path]:
    return sorted([*ROOT.glob("slime_core/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])


def definitions() -> Iterator[tuple[Path, ast.stmt, str, int]]:
    """(file, node, name, lines) of every function and class."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield path, node, node.name, (node.end_lineno or 0) - node.lineno + 1


def test_the_kernel_is_small():
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("slime_core/**/*.py"))
    assert lines < KERNEL_LINES


def test_few_modules_are_beside_the_kernels_packages():
    assert {path.stem for path in ROOT.glob("slime_core/*.py")} == TOP_MODULES


def test_every_package_of_the_kernel_has_a_docstring():
    packages = sorted(path.parent for path in ROOT.glob("slime_core/*/__init__.py"))
    assert len(packages) == 11
    for package in packages:
        purpose = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        assert purpose, package
        assert "\n" not in purpose, package


def test_functions_are_short():
    long = [
        f"{path.relative_to(ROOT)}: {name} has {lines} lines"
        for path, node, name, lines in definitions()
        if lines > FUNCTION_LINES and not isinstance(node, ast.ClassDef)
    ]
    assert not long, "\n".join(long)


def test_a_large_class_has_a_reason():
    large = {name for _, node, name, lines in definitions() if lines > CLASS_LINES and isinstance(node, ast.ClassDef)}
    assert large == LARGE_CLASSES.keys()
