"""The task of the search example: which module of the standard library defines a name?

The corpus is Python's own standard library, read from its source files (nothing is imported): a document for each public
function and class, with its module as title. A question is a name, such as `dedent?`. Only a search tells the module of
a name that was not in the training: `<search>dedent</search>` finds textwrap's document, and the answer is in its title.

The warm start (`../warm_start.py`) shows both ways, guessing at once and searching first, and copying is not learnt well
yet; reinforcement learning sees only whether the answer is right.
"""

from __future__ import annotations

import ast
import re
import string
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from slime_core.new_model import ModelSizes

NUM_HELD_OUT: Final = 300
NOT_READ: Final = {"idlelib", "lib2to3", "test", "tests", "this", "antigravity", "turtledemo", "site-packages"}
FIXED: Final = (
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    "\n\n<information>",
    "</information>\n\n",
    "Doc 1(Title: ",
)
NUM_PAIRS: Final = 200
GUESSES: Final = 0.3
"""Share of worked examples that guess."""
INFORMATION_CHARS: Final = 36
"""About what run.toml lets through."""
NUM_WORKED: Final = 20_000


class Definition(NamedTuple):
    module: str
    name: str
    summary: str
    """First line of its docstring."""

    @property
    def text(self) -> str:
        return f"{self.name}: {self.summary}"


class WhichModule:
    alphabet = string.ascii_letters + string.digits + string.punctuation + " \n"
    chat_template = None
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_length=160)
    enough = 0.15
    lr = 6e-3
    max_steps = 1000

    @cached_property
    def tokens(self) -> list[str]:
        """What is always the same, and pairs of letters that names often have: short sequences are learnt sooner."""
        words = [word for d in definitions() for word in re.findall("[a-z]{2,}", f"{d.module} {d.name}")]
        pairs = Counter(word[start : start + 2] for word in words for start in range(0, len(word) - 1, 2))
        return [*FIXED, *(pair for pair, _ in pairs.most_common(NUM_PAIRS))]

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        known = list(questions())
        shuffled = [known[number] for number in np.random.default_rng(seed).permutation(len(known))]
        rows = [{"prompt": f"{d.name}?", "label": d.module, "metadata": {"summary": d.summary}} for d in shuffled]
        return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]

    def files(self) -> dict[str, list[dict[str, Any]]]:
        return {"corpus.jsonl": [{"title": d.module, "text": d.text} for d in definitions()]}

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        """Of made-up names and modules: what they teach is to copy, not what Python has."""
        draws = np.random.default_rng(seed)
        names, modules = [row["prompt"].removesuffix("?") for row in rows], [row["label"] for row in rows]
        summaries = [row["metadata"]["summary"] for row in rows]
        return [
            worked(crossed(names, draws), crossed(modules, draws), summaries[draws.integers(len(rows))], draws)
            for _ in range(NUM_WORKED)
        ]


def crossed(words: Sequence[str], draws: np.random.Generator) -> str:
    """The beginning of one and the end of another."""
    one, other = (words[number] for number in draws.integers(len(words), size=2))
    return one[: draws.integers(1, len(one) + 1)] + other[draws.integers(len(other)) :]


def worked(name: str, module: str, summary: str, draws: np.random.Generator) -> list[tuple[str, bool]]:
    if draws.random() < GUESSES:
        return [(f"{name}?", False), (f"<answer>{module}</answer>", True)]
    found = f"{module}) {name}: {summary}"
    return [
        (f"{name}?", False),
        (f"<search>{name}</search>", True),
        (f"\n\n<information>Doc 1(Title: {found[:INFORMATION_CHARS]}</information>\n\n", False),
        (f"<answer>{module}</answer>", True),
    ]


@cache
def definitions() -> tuple[Definition, ...]:
    """Public functions and classes of the standard library's own source files, in order of their modules."""
    return tuple(read_definitions())


def read_definitions() -> Iterator[Definition]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        public = parts and not NOT_READ & set(parts) and not any(part.startswith("_") for part in parts)
        if not public or parts[0] not in sys.stdlib_module_names:
            continue
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith(
                "_"
            ):
                summary = (ast.get_docstring(node) or "").partition("\n")[0]
                yield Definition(".".join(parts), node.name, summary.encode("ascii", "replace").decode())


def questions() -> Iterator[Definition]:
    """Names that one module alone defines."""
    found = definitions()
    modules: dict[str, set[str]] = {}
    for definition in found:
        modules.setdefault(definition.name.lower(), set()).add(definition.module)
    asked = set()
    for definition in found:
        key = definition.name.lower()
        if len(modules[key]) == 1 and key not in asked:
            asked.add(key)
            yield definition


TASK = WhichModule()
