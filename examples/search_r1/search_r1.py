"""The task of the search example: which module of the standard library defines a name?

The corpus is Python's own standard library, read from its source files (nothing is imported): a document for each public
function and class, with its module as title. A question is a name, such as `dedent?`. The model must search for the
module: `<search>dedent</search>` finds textwrap's document, and the answer is in its title.

The warm start (`../warm_start.py`) trains on these words, but only in made-up pairs of names and modules. Afterwards the model
mostly guesses, and sometimes searches. Reinforcement learning, with only the reward of the answer, must teach it to search.
"""

from __future__ import annotations

import ast
import string
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from slime_models.new_model import ModelSizes

NUM_QUESTIONS: Final = 1000
NUM_HELD_OUT: Final = 200
NOT_READ: Final = {"idlelib", "lib2to3", "test", "tests", "this", "antigravity", "turtledemo", "site-packages"}
MARKS: Final = (
    "<search>",
    "</search>",
    "<answer>",
    "</answer>",
    "\n\n<information>",
    "</information>\n\n",
    "Doc 1(Title: ",
)
NUM_WORKED: Final = 20_000
GUESSES: Final = 0.75
"""Share of worked examples that guess. High enough that the warm start's best answer is a guess, however its weights come out on
another processor."""
SUMMARY_CHARS: Final = 6
"""About as many as run.toml allows (max_information_tokens)."""


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
    sizes = ModelSizes(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=256,
        max_length=160,
        tie_word_embeddings=True,
    )
    enough = 0.05
    lr = 6e-3
    max_steps = 600

    @cached_property
    def tokens(self) -> list[str]:
        """Each name and each module is one token: the model must learn to search, not to spell."""
        return list(
            dict.fromkeys([*MARKS, *(word for d in questions() for word in (d.name, d.module) if len(word) > 1)])
        )

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        known = questions()
        shuffled = [known[number] for number in np.random.default_rng(seed).permutation(len(known))]
        rows = [{"prompt": f"{d.name}?", "label": d.module} for d in shuffled]
        return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]

    def files(self) -> dict[str, list[dict[str, Any]]]:
        return {"corpus.jsonl": [{"title": d.module, "text": d.text} for d in definitions()]}

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        """Worked examples with made-up pairs: they teach to search and to copy, but no facts about Python."""
        draws = np.random.default_rng(seed)
        known = questions()
        modules = sorted({d.module for d in known})

        def worked() -> list[tuple[str, bool]]:
            name, module = known[draws.integers(len(known))].name, modules[draws.integers(len(modules))]
            answer = (f"<answer>{module}</answer>", True)
            if draws.random() < GUESSES:
                return [(f"{name}?", False), answer]
            summary = known[draws.integers(len(known))].summary[:SUMMARY_CHARS]
            found = f"\n\n<information>Doc 1(Title: {module}) {name}: {summary}</information>\n\n"
            return [(f"{name}?", False), (f"<search>{name}</search>", True), (found, False), answer]

        return [worked() for _ in range(NUM_WORKED)]


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


@cache
def questions() -> list[Definition]:
    """Documented names that only one module defines; always the same ones."""
    modules: dict[str, set[str]] = {}
    for definition in definitions():
        modules.setdefault(definition.name.lower(), set()).add(definition.module)
    asked = {d.name.lower(): d for d in definitions() if d.summary and len(modules[d.name.lower()]) == 1}
    chosen = np.random.default_rng(0).permutation(len(asked))[:NUM_QUESTIONS]
    known = list(asked.values())
    return [known[number] for number in sorted(chosen)]


TASK = WhichModule()
