"""TrlScript: what a Python script passes to GRPOConfig and GRPOTrainer, read from its syntax tree. Nothing is executed."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from slime_compat.flag_words import flag_words, guessed
from slime_core.errors import ConfigError

CONFIG: Final = "GRPOConfig"
TRAINER: Final = "GRPOTrainer"
PEFT: Final = "LoraConfig"
PARSERS: Final = ("TrlParser", "HfArgumentParser")
ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class NoLiteral(ValueError):
    """The expression is no literal."""


@dataclass(frozen=True, slots=True)
class Unread:
    """A keyword whose value is known only while the script runs."""

    keyword: str
    line: int
    source: str


@dataclass(slots=True, kw_only=True)
class TrlScript:
    path: Path
    tree: ast.Module
    keywords: dict[str, Any] = field(default_factory=dict)
    """Literal keywords of GRPOConfig, then those of the command line."""
    trainer: dict[str, ast.expr] = field(default_factory=dict)
    """Keywords of GRPOTrainer."""
    peft: dict[str, Any] = field(default_factory=dict)
    """Literal keywords of LoraConfig."""
    unread: list[Unread] = field(default_factory=list)
    names: dict[str, ast.expr] = field(default_factory=dict)
    """Names that are assigned once in the script, to their values."""

    def literal(self, value: ast.expr, depth: int = 8) -> Any:
        """The value of a literal, of a name for one, or of arithmetic with them. NoLiteral if it is none."""
        match value:
            case ast.Name() if value.id in self.names and depth:
                return self.literal(self.names[value.id], depth - 1)
            case ast.BinOp() if type(value.op) in ARITHMETIC:
                left, right = self.literal(value.left, depth), self.literal(value.right, depth)
                if isinstance(left, int | float) and isinstance(right, int | float) and right:
                    return ARITHMETIC[type(value.op)](left, right)
            case ast.List() | ast.Tuple():
                return [self.literal(element, depth) for element in value.elts]
        try:
            return ast.literal_eval(value)
        except ValueError:
            raise NoLiteral(ast.unparse(value)) from None

    def expression(self, value: ast.expr) -> ast.expr:
        """The value of a name, if it is assigned once; else the expression itself."""
        while isinstance(value, ast.Name) and value.id in self.names:
            value = self.names[value.id]
        return value


def read(path: Path, words: Sequence[str], note: Callable[..., None]) -> TrlScript:
    """The script, with the flags of its command line. ConfigError if it cannot be read, or makes no GRPOConfig."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such script.") from None
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    script = TrlScript(path=path, tree=tree)
    script.names.update(assigned_once(tree))
    configs, trainers = list(calls(tree, CONFIG)), list(calls(tree, TRAINER))
    parsed = any(True for name in PARSERS for _ in calls(tree, name))
    if len(configs) > 1 or len(trainers) > 1:
        many = CONFIG if len(configs) > 1 else TRAINER
        lines = ", ".join(str(call.lineno) for call in (configs if len(configs) > 1 else trainers))
        raise ConfigError(f"{path}: it calls {many} in lines {lines}. Leave one of them in a copy of the script.")
    if not configs and not (parsed and trainers):
        raise ConfigError(f"{path}: it calls no {CONFIG}(...); only scripts of {TRAINER} are translated.")
    for call in configs:
        take(script, call, script.keywords)
    for call in trainers:
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
        script.trainer.update(dict(zip(("model", "reward_funcs", "args"), call.args, strict=False)) | arguments)
    for call in calls(tree, PEFT):
        take(script, call, script.peft)
    for name, values in flag_words(words, note):
        script.keywords[name.replace("-", "_")] = guessed(values)
    return script


def take(script: TrlScript, call: ast.Call, into: dict[str, Any]) -> None:
    for keyword in call.keywords:
        name = keyword.arg or f"**{ast.unparse(keyword.value)}"
        try:
            if keyword.arg is None:
                raise NoLiteral
            into[name] = script.literal(keyword.value)
        except NoLiteral:
            script.unread.append(Unread(name, keyword.value.lineno, ast.unparse(keyword.value)))


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of a function under its name, or as an attribute of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == name:
            yield node


def called(call: ast.Call) -> str:
    """The last part of the name of the called function."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def assigned_once(tree: ast.AST) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    count: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            count[node.id] += 1
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                found[name] = value
    return {name: value for name, value in found.items() if count[name] == 1}
