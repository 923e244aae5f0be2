"""The label of a prompt, and the name of a prompt in error messages."""

from __future__ import annotations

import math
from numbers import Real

from slime_core.errors import RewardError
from slime_core.types.prompt import Prompt


def place(prompt: Prompt) -> str:
    return prompt.origin or f"prompt draw {prompt.group_index}"


def label_of(prompt: Prompt, *, reward: str) -> object:
    """The label; RewardError if there is none."""
    if prompt.label is None:
        raise RewardError(
            f"reward {reward!r}: {place(prompt)} has no label. Every prompt requires the right answer. "
            "Set data.label_key to the column that has it."
        )
    return prompt.label


def texts_of(prompt: Prompt, *, reward: str) -> tuple[str, ...]:
    """The right answers as text: the label, or every element of a list."""
    label = label_of(prompt, reward=reward)
    choices = label if isinstance(label, list | tuple) else (label,)
    for choice in choices:
        number = isinstance(choice, Real) and not isinstance(choice, bool) and math.isfinite(choice)
        if not isinstance(choice, str) and not number:
            raise RewardError(
                f"reward {reward!r}: {place(prompt)} has the label {label!r}; it must be text, a finite number, or a "
                "list of these."
            )
    return tuple(str(choice) for choice in choices)
