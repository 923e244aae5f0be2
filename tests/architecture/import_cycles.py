"""Prints the import cycles over all modules of all distributions; the exit code is 1 if there are any.

Imports inside functions and those for type checking count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]


def packages() -> list[str]:
    """The import names of all distributions."""
    return ["slime_core", *sorted(init.parent.name for init in ROOT.glob("plugins/*/src/*/__init__.py"))]


def imports(names: list[str]) -> dict[str, set[str]]:
    """Module to the modules that it imports."""
    graph = grimp.build_graph(*names, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}


def cycles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The strongly connected components of more than one module (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[list[str]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in index:
                yield from visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                yield sorted(component)

    for module in graph:
        if module not in index:
            yield from visit(module)


def main() -> int:
    sys.setrecursionlimit(10_000)
    names = packages()
    graph = imports(names)
    found = list(cycles(graph))
    for component in found:
        print(f"{len(component)} modules import each other: {', '.join(component)}")
    print(f"{len(found)} import cycles in {len(graph)} modules of {len(names)} distributions")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
