"""Choices of the server's options, read from SGLang's source."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias

Choices: TypeAlias = tuple[str | int, ...]
"""The allowed values; empty: any value, or unknown."""
EXTENDING: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
"""Groups of entry points whose packages may add to SGLang's named lists when a server starts."""
ADDING: Final = ("extend", "append", "update", "add")


@dataclass(frozen=True, slots=True)
class NamedLists:
    """Lists of choices that have a name in SGLang, except those to which plugins here may add."""

    by_name: Mapping[str, Choices]

    @classmethod
    def of(cls, modules: Iterable[ast.Module], *, extended: bool) -> NamedLists:
        """`extended`: packages that may add to lists are installed."""
        found: dict[str, Choices] = {}
        growing: set[str] = set()
        for module in modules:
            for statement in module.body:
                if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    found[statement.targets[0].id] = constants(statement.value)
            growing |= {
                node.value.id
                for node in ast.walk(module)
                if isinstance(node, ast.Attribute) and node.attr in ADDING and isinstance(node.value, ast.Name)
            }
        return cls({name: values for name, values in found.items() if values and not (extended and name in growing)})

    def read(self, node: ast.expr | None) -> Choices:
        """The choices in `choices=NODE`: constants, the name of a list, or a sum of these."""
        if isinstance(node, ast.Name):
            return self.by_name.get(node.id, ())
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.read(node.left), self.read(node.right)
            return left + right if left and right else ()
        return () if node is None else constants(node)


def may_be_extended() -> bool:
    return any(entry_points(group=group) for group in EXTENDING)


def constants(node: ast.expr) -> Choices:
    """The values of a literal list, tuple or set."""
    try:
        values: Any = ast.literal_eval(node)
    except ValueError:
        return ()
    if not isinstance(values, list | tuple | set):
        return ()
    named = [value for value in values if value is not None]
    return tuple(named) if all(isinstance(value, str | int) for value in named) else ()


def literals(node: ast.expr) -> Choices:
    """The values of `Literal[...]`, also inside Optional."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name) and inner.value.id == "Literal":
            values = inner.slice
            return constants(values if isinstance(values, ast.Tuple) else ast.Tuple([values], ast.Load()))
    return ()
