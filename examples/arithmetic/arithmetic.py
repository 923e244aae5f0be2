"""The task of the arithmetic examples: adding numbers of three digits without carries.

The model writes the digits of the sum from the units up, then the answer in a box: `312+457=` is worked as
`9,6,7\\boxed{769}`. The warm start (`../warm_start.py`) teaches the form and a little of the arithmetic; reinforcement
learning, which sees only whether the box is right, has to teach the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from slime_models.new_model import ModelSizes

NUM_HELD_OUT: Final = 500


class Addition:
    alphabet = "0123456789+=,}"
    tokens = ("\\boxed{",)
    chat_template = None
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, max_length=64)
    # Greedy answers are right more often than that.
    enough = 0.2
    lr = 6e-3
    max_steps = 300

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        train, held_out = split(seed)
        return [row(a, b) for a, b in train], [row(a, b) for a, b in held_out]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        return [[(row["prompt"], False), (answer(row["label"]), True)] for row in rows]


def row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "label": str(a + b)}


def answer(total: str) -> str:
    """With its working."""
    return f"{','.join(reversed(total))}\\boxed{{{total}}}"


def carries(a: int, b: int) -> bool:
    return any(int(x) + int(y) > 9 for x, y in zip(str(a), str(b), strict=True))


def split(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training and held-out problems. A problem and its mirror image (b+a) are never on different sides."""
    problems = [(a, b) for a in range(100, 1000) for b in range(100, 1000) if not carries(a, b)]
    shuffled = [problems[number] for number in np.random.default_rng(seed).permutation(len(problems))]
    held_out = shuffled[:NUM_HELD_OUT]
    taken = {frozenset(pair) for pair in held_out}
    return [pair for pair in shuffled[NUM_HELD_OUT:] if frozenset(pair) not in taken], held_out


TASK = Addition()
