"""Rules for `reward`: TRL's functions of (prompts, completions, **columns) run unchanged, from their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from slime_compat.trl.script import TRAINER, NoLiteral, called
from slime_compat.trl.translation import TrlTranslation

OF_TRL: Final = "trl.rewards"
TRL_NAMES: Final = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Names that `trl grpo --reward_funcs` knows."""


def reward(translation: TrlTranslation) -> None:
    listed = translation.given.get("reward_funcs")
    translation.read.add("reward_funcs")
    if listed is not None:
        names = listed if isinstance(listed, list) else [listed]
        functions = [f"{OF_TRL}.{name}" if name in TRL_NAMES else str(name) for name in names]
    else:
        functions = [path for path in of_script(translation) if path]
    weights = translation.value("reward_weights")
    if not functions:
        if all(note.flag != "reward_funcs" for note in translation.notes):
            translation.note("reward_funcs", "no function was found; set reward (slime plugins)", trains=True)
        return
    folder = str(translation.script.path.parent)
    tables: list[dict[str, Any]] = [{"name": "trl", "path": path, "python_path": [folder]} for path in functions]
    if len(tables) == 1 and not weights:
        translation.put("reward", tables[0])
        return
    if isinstance(weights, list) and len(weights) != len(tables):
        translation.note("reward_weights", f"{len(weights)} weights for {len(tables)} functions", trains=True)
        weights = None
    for at, table in enumerate(tables):
        table["label"] = table["path"].rpartition(".")[2]
        table["weight"] = float(weights[at]) if isinstance(weights, list) else 1.0
    translation.put("rewards", tables)


def of_script(translation: TrlTranslation) -> Iterator[str | None]:
    given = translation.script.trainer.get("reward_funcs")
    if given is None:
        return
    value = translation.script.expression(given)
    for element in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
        yield function_path(translation, element)


def function_path(translation: TrlTranslation, element: ast.expr) -> str | None:
    """The dotted path of a function; None, with a note, for anything else."""
    imported = imports(translation.script.tree)
    source = ast.unparse(element)
    if isinstance(element, ast.Name | ast.Attribute):
        first, _, rest = source.partition(".")
        if first in imported:
            return f"{imported[first]}.{rest}" if rest else imported[first]
        if isinstance(element, ast.Name) and element.id in defined(translation.script.tree):
            if trains_on_import(translation.script.tree):
                translation.note(
                    "reward_funcs",
                    f"{source}: importing the script would train. Move the function to a module of its own, and set its path",
                    trains=True,
                )
            return f"{translation.script.path.stem}.{source}"
    try:
        named = translation.script.literal(element)
        text = f"{named}: a reward model is served by engines.reward, with the reward served"
    except NoLiteral:
        text = f"line {element.lineno}: {source}: no function of a module; write one, and set its path"
    translation.note("reward_funcs", text, trains=True)
    return None


def imports(tree: ast.Module) -> dict[str, str]:
    """Names that the script imports, to their dotted paths."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Import):
            # `import a.b` binds a, whose attribute b is read later.
            bound = [
                (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
                for alias in node.names
            ]
            found.update(dict(bound))
    return found


def defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def trains_on_import(tree: ast.Module) -> bool:
    """Whether the trainer is built outside of functions and of `if __name__ == "__main__"`."""
    for node in tree.body:
        guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if guarded or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if any(isinstance(inner, ast.Call) and called(inner) == TRAINER for inner in ast.walk(node)):
            return True
    return False
