"""The task of the retool example: products of numbers of three and two digits, which so small a model cannot compute.

What it can do is copy: the factors into a code block, and what the block prints into a box. The warm start
(`../warm_start.py`) teaches the form, with a copy of the factors that is often wrong; reinforcement learning,
which sees only whether the box is right, has to teach what is worth copying, and from where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from slime_models.new_model import ModelSizes

NUM_TRAIN: Final = 4000
NUM_HELD_OUT: Final = 200
NOISE: Final = 0.5
"""Chance of a worked example with another digit somewhere in its code."""


class Multiplication:
    alphabet = "0123456789*=}"
    tokens = ("<code>print(", ")</code>", "<interpreter>", "</interpreter>", "\\boxed{")
    chat_template = None
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=192, max_length=64)
    enough = 0.06
    lr = 6e-3
    max_steps = 600

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """A problem is on one side only."""
        draws = np.random.default_rng(seed).permutation(900 * 90)[: NUM_TRAIN + NUM_HELD_OUT]
        rows = [row(100 + draw // 90, 10 + draw % 90) for draw in draws.tolist()]
        return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        rng = np.random.default_rng(seed)
        return [worked(row["prompt"].removesuffix("="), rng) for row in rows]


def row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}*{b}=", "label": str(a * b)}


def worked(product: str, rng: np.random.Generator) -> list[tuple[str, bool]]:
    """A worked example. The interpreter's output is right for the code, whose factors may differ from the problem's."""
    asked = product
    if rng.random() < NOISE:
        place = int(rng.choice([place for place, sign in enumerate(product) if sign != "*"]))
        asked = f"{product[:place]}{rng.integers(1, 10)}{product[place + 1 :]}"
    a, b = map(int, asked.split("*"))
    return [
        (f"{product}=", False),
        (f"<code>print({asked})</code>", True),
        (f"<interpreter>{a * b}</interpreter>", False),
        (f"\\boxed{{{a * b}}}", True),
    ]


TASK = Multiplication()
