"""The task of the multi_agent example: a reader sees some digits and which of them is asked for, an adder sees what is to be
added to it. Neither can answer alone; the reader leaves a note, and both are rewarded for the adder's box.

`7394?2` with 4 to be added: the reader notes `3`, the adder reads `3+4=` and boxes 7. The warm start (`../warm_start.py`)
teaches the adder to add and the reader to note one of the digits, mostly another one than was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from slime_models.new_model import ModelSizes

NUM_TRAIN: Final = 4000
NUM_HELD_OUT: Final = 200
NUM_DIGITS: Final = 4
KNOWING: Final = 0.35
"""Chance of a note in the warm start that is right on purpose."""


class Note:
    alphabet = "0123456789?+=}"
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
            digits, place = row["prompt"].split("?")
            noted = digits[int(place) - 1] if rng.random() < KNOWING else rng.choice(list(digits))
            addend = row["metadata"]["addend"]
            digit = int(rng.integers(10))
            examples += [
                [(row["prompt"], False), (str(noted), True)],
                [(f"{digit}+{addend}=", False), (f"\\boxed{{{digit + addend}}}", True)],
            ]
        return examples


def row(rng: np.random.Generator) -> dict[str, Any]:
    digits = rng.choice(10, NUM_DIGITS, replace=False)
    place, addend = int(rng.integers(NUM_DIGITS)), int(rng.integers(10))
    return {
        "prompt": f"{''.join(map(str, digits))}?{place + 1}",
        "label": str(digits[place] + addend),
        "metadata": {"addend": addend},
    }


TASK = Note()
