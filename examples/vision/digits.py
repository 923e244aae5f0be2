"""The task of the vision example: to name the digit that a picture shows.

Pictures are 32 x 32 pixels: a digit of seven segments, somewhere, in some colour, over noise. The warm start
(`../warm_start.py`) teaches the form and some of the digits; reinforcement learning, which sees only whether the box is
right, has to teach the rest, and with it the vision tower.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import PIL.Image

from slime_models.new_model import ModelSizes
from slime_models.new_vision_model import CHAT_TEMPLATE, END, IMAGE, START, VisionSizes

SIDE: Final = 32
PATCH: Final = 8
NUM_TRAIN: Final = 3000
NUM_HELD_OUT: Final = 300
SEGMENTS: Final = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd")
"""Which of the seven segments are lit, from a on the top around to f, and g in the middle."""
WIDTH, HEIGHT, STROKE = 12, 20, 3
PLACES: Final = {
    "a": (0, 0, WIDTH, STROKE),
    "b": (WIDTH - STROKE, 0, STROKE, HEIGHT // 2),
    "c": (WIDTH - STROKE, HEIGHT // 2, STROKE, HEIGHT // 2),
    "d": (0, HEIGHT - STROKE, WIDTH, STROKE),
    "e": (0, HEIGHT // 2, STROKE, HEIGHT // 2),
    "f": (0, 0, STROKE, HEIGHT // 2),
    "g": (0, (HEIGHT - STROKE) // 2, WIDTH, STROKE),
}
"""Left, top, width and height of each segment."""


class Digits:
    alphabet = "0123456789}"
    tokens = ("\\boxed{",)
    chat_template = CHAT_TEMPLATE
    sizes = ModelSizes(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=128, max_length=32)
    vision = VisionSizes(
        hidden_size=64, num_layers=2, num_heads=4, intermediate_size=128, patch_size=PATCH, deepstack_layers=(0,)
    )
    enough = 0.3
    lr = 3e-3
    max_steps = 600

    def rows(self, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        digits = np.random.default_rng(seed).integers(10, size=NUM_TRAIN + NUM_HELD_OUT)
        rows = [row(number, int(digit)) for number, digit in enumerate(digits)]
        return rows[:NUM_TRAIN], rows[NUM_TRAIN:]

    def worked(self, rows: Sequence[dict[str, Any]], seed: int) -> list[list[tuple[str, bool]]]:
        prompt = START + IMAGE * (SIDE // PATCH // 2) ** 2 + END
        return [[(prompt, False), (f"\\boxed{{{row['label']}}}", True)] for row in rows]

    def images(self, row: Mapping[str, Any]) -> dict[str, bytes]:
        """The files that a row names, by their names."""
        name = row["images"][0]
        seed = int(name.partition("/")[2].removesuffix(".png"))
        return {name: picture(int(row["label"]), np.random.default_rng(seed))}

    def files(self) -> dict[str, Iterable[dict[str, Any]]]:
        """The control: held-out questions, each with another one's picture."""
        _, held_out = self.rows(SEED_OF_CONTROL)
        pictures = np.random.default_rng(0).permutation(len(held_out))
        swapped = [{**row, "images": held_out[other]["images"]} for row, other in zip(held_out, pictures, strict=True)]
        return {"swapped.jsonl": swapped}


SEED_OF_CONTROL: Final = 2
"""warm_start.py's own."""


def row(number: int, digit: int) -> dict[str, Any]:
    return {"prompt": "<image>", "images": [f"pictures/{number}.png"], "label": str(digit)}


def picture(digit: int, random: np.random.Generator) -> bytes:
    """A PNG."""
    pixels = random.normal(90, 30, (SIDE, SIDE, 3))
    left, top = random.integers(SIDE - WIDTH), random.integers(SIDE - HEIGHT)
    colour = random.uniform(170, 255, 3)
    for segment in SEGMENTS[digit]:
        x, y, width, height = PLACES[segment]
        pixels[top + y : top + y + height, left + x : left + x + width] = colour
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()


TASK = Digits()
