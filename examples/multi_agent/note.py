"""The task of the multi_agent example: a reader sees a table and which entry is asked for, an adder sees what is to be added to
it. Neither can answer alone; the reader leaves a note, and both are rewarded for the adder's box.

`b7f3k1?f` with 4 to be added: the reader notes `3`, the adder reads `3+4=` and boxes 7. The warm start (`../warm_start.py`)
teaches the adder to add and the reader to note some entry of the table, mostly a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from slime_core.new_model import ModelSizes

NUM_TRAIN: Final = 4000
NUM_HELD_OUT: Final = 200
LETTERS: Final = "bfkmtz"
NUM_ENTRIES: Final = 3
KNOWING: Final = 0.25
"""Chance of a note in the warm start that is right on purpose."""


class Note:
    alphabet = f"0123456789{LETTERS}?+=}}"
    tokens = ("\\boxed{",)
    chat_template = None
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=192, max_length=64)
    enough = 0.6
    lr = 6e-3
    max_steps = 600

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        rng = np.random.default_rng(seed)
        rows: dict[str, dict[str, Any]] = {}
        while len(rows) < NUM_TRAIN + NUM_HELD_OUT:
            new = row(rng)
            rows[new["prompt"]] = new
        shuffled = list(rows.values())
        return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        rng = np.random.default_rng(seed)
        examples = []
        for row in rows:
            entries, asked = row["prompt"].split("?")
            noted = entries[entries.index(asked) + 1] if rng.random() < KNOWING else rng.choice(list(entries[1::2]))
            addend = row["metadata"]["addend"]
            digit = int(rng.integers(10))
            examples += [
                [(row["prompt"], False), (str(noted), True)],
                [(f"{digit}+{addend}=", False), (f"\\boxed{{{digit + addend}}}", True)],
            ]
        return examples


def row(rng: np.random.Generator) -> dict[str, Any]:
    letters = rng.choice(list(LETTERS), NUM_ENTRIES, replace=False)
    digits = rng.integers(10, size=NUM_ENTRIES)
    asked, addend = int(rng.integers(NUM_ENTRIES)), int(rng.integers(10))
    entries = "".join(f"{letter}{digit}" for letter, digit in zip(letters, digits, strict=True))
    return {
        "prompt": f"{entries}?{letters[asked]}",
        "label": str(digits[asked] + addend),
        "metadata": {"addend": addend},
    }


TASK = Note()
