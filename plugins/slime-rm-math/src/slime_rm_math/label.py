"""What a prompt's label accepts as right answers."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Integral, Real
from typing import TYPE_CHECKING

from slime_core.errors import RewardError

if TYPE_CHECKING:
    from slime_core.types.prompt import Prompt


def accepted_answers(prompt: Prompt, *, reward: str) -> tuple[str, ...]:
    """The label as text; of a list, every element: one right answer is enough.

    RewardError if the label is missing, or neither text nor a finite number nor a list of those.
    """
    label = prompt.label
    if label is None:
        raise RewardError(
            f"reward {reward!r}: {place(prompt)} has no label. Every prompt needs the right answer; "
            "name the column that holds it with data.label_key."
        )
    choices = label if isinstance(label, list | tuple) else (label,)
    return tuple(_text(choice, prompt, reward) for choice in choices)


def place(prompt: Prompt) -> str:
    """How to name a prompt in a message."""
    return prompt.origin or f"prompt draw {prompt.group_index}"


def _text(label: object, prompt: Prompt, reward: str) -> str:
    match label:
        case str():
            return label
        case bool():
            # An Integral too, but nobody's answer.
            pass
        case Integral():
            return str(int(label))
        case Real() if math.isfinite(label):
            # Never with an exponent, which no answer is written with.
            return format(Decimal(repr(float(label))), "f")
    raise RewardError(
        f"reward {reward!r}: {place(prompt)} has the label {label!r} ({type(label).__name__}); "
        "a label is text, a finite number, or a list of those."
    )
