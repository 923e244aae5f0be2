"""The arithmetic example's task for a model of the sizes that the tests' server serves. It writes the box letter by letter."""

import importlib.util
from pathlib import Path

from slime_models.new_model import ModelSizes
from slime_plugin_kit.tiny_model import ALPHABET

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic" / "arithmetic.py"
CHARACTERS = ALPHABET + ",}\\ox{"
SIZES = ModelSizes(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=256,
    max_length=2048,
    tie_word_embeddings=True,
)
"""Heads of 32 elements, the smallest on a CPU."""


def task_of_the_example():
    spec = importlib.util.spec_from_file_location("arithmetic", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Addition(module.Addition):
        alphabet, tokens, sizes = CHARACTERS, (), SIZES

    return Addition()


TASK = task_of_the_example()
