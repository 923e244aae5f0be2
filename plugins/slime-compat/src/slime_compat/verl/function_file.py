"""Loads a function from a Python file, as verl does for custom_reward_function."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from slime_compat.old_function import OldFunction, matched
from slime_core.errors import PluginError

NAME: Final = "verl_reward_function"
"""Of the module, which is not importable under it."""


def function_in(path: Path, name: str, *, where: str) -> OldFunction:
    """PluginError if the file or the function is missing, or the file cannot be imported. where: table of the run file."""
    asked = f'{where}.path = "{path}"'
    spec = importlib.util.spec_from_file_location(NAME, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise PluginError(f"{asked}: no such Python file. Set it to the file that has {name}.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Importing runs user code, which may raise any exception.
        raise PluginError(f"{asked}: importing it raised {type(error).__name__}: {error}.") from error
    found = vars(module).get(name)
    if not callable(found):
        functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise PluginError(
            f'{where}.function = "{name}": {path} has no function of this name{matched(name, functions)}. '
            f"It has: {', '.join(functions) or 'none'}."
        )
    return found  # type: ignore[no-any-return]
