"""Resolves dotted paths to functions, and checks their signatures."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from slime_compat import stand_ins
from slime_core.errors import PluginError, near_matches

OldFunction: TypeAlias = Callable[..., Any]


def resolve(path: str, python_path: Sequence[str], *, where: str, is_class: bool = False) -> OldFunction:
    """Returns the function, or the class. PluginError names the part of the path that is missing, and what there is.

    where: key of the run file that has the path."""
    asked = f'{where} = "{path}"'
    module_path, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise PluginError(f"{asked}: must be a dotted path, package.module.function.")
    stand_ins.install()
    # Appended: a folder of scripts must not hide installed packages.
    sys.path.extend(folder for folder in python_path if folder not in sys.path)
    importlib.invalidate_caches()
    module = import_module(module_path, python_path, asked)
    try:
        found = getattr(module, name)
    except AttributeError:
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        file = ""
        if name == "py":
            file = f" This is the path of a file, not of a function. Set it to {module_path}.FUNCTION."
        raise PluginError(
            f'{asked}: module {module_path} has no "{name}"{matched(name, functions)}. '
            f"It has: {', '.join(functions) or 'no function'}.{file}"
        ) from None
    if not callable(found) or inspect.isclass(found) != is_class:
        callables = "a class" if inspect.isclass(found) else "a function"
        kind = callables if callable(found) else f"of type {type(found).__name__}"
        raise PluginError(f"{asked}: it is {kind}. It must be a {'class' if is_class else 'function'}.")
    return found  # type: ignore[no-any-return]


def import_module(name: str, python_path: Sequence[str], asked: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(missing + "."):
            raise PluginError(f"{asked}: module {name} cannot be imported: {error}.") from error
        parent, _, last = missing.rpartition(".")
        folders = list(sys.modules[parent].__path__) if parent in sys.modules else [*python_path]
        beside = [module.name for module in pkgutil.iter_modules(folders)]
        looked = (
            f"in package {parent}"
            if parent
            else f"on the interpreter's path and in {', '.join(python_path) or 'no more'}"
        )
        raise PluginError(
            f'{asked}: there is no module "{last}" {looked}{matched(last, beside)}. '
            "Set python_path to the folder that contains it."
        ) from None
    except Exception as error:
        # Importing runs user code, which may raise any exception.
        raise PluginError(f"{asked}: importing {name} raised {type(error).__name__}: {error}.") from error


def matched(name: str, known: Sequence[str]) -> str:
    close = near_matches(name, known)
    return f"; close match: {', '.join(close)}" if close else ""


def parameters(function: OldFunction) -> list[str]:
    """Names of its positional parameters."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind in by_position]


def takes(function: OldFunction, count: int) -> bool:
    """Whether it can be called with `count` positional arguments and nothing else."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def takes_keyword(function: OldFunction, name: str) -> bool:
    return name in inspect.signature(function).parameters


def wrong_form(path: str, function: OldFunction, where: str, forms: str) -> PluginError:
    return PluginError(
        f'{where} = "{path}": it takes {inspect.signature(function)}, and is called as {forms}. Write a function with that '
        "signature that calls it."
    )


async def finished(value: Awaitable[Any] | Any) -> Any:
    """The result of a function that may be a coroutine."""
    return await value if inspect.isawaitable(value) else value
