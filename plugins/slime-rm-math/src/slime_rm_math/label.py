"""The right answers in a prompt's label."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Integral, Real
from typing import TYPE_CHECKING

from slime_core.errors import RewardError

if TYPE_CHECKING:
    from slime_core.types.prompt import Prompt


def accepted_answers(prompt: Prompt, *, reward: str) -> tuple[str, ...]:
    """The label as text, or every element of a list, each of which is right.

    RewardError if the label is missing, or neither text nor a finite number nor a list of those.
    """
    label = prompt.label
    if label is None:
        raise RewardError(
            f"reward {reward!r}: {place(prompt)} has no label. Every prompt requires the right answer. "
            "Set data.label_key to the column that has it."
        )
    choices = label if isinstance(label, list | tuple) else (label,)
    return tuple(_text(choice, prompt, reward) for choice in choices)


def place(prompt: Prompt) -> str:
    """The name of a prompt in an error."""
    return prompt.origin or f"prompt draw {prompt.group_index}"


def _text(label: object, prompt: Prompt, reward: str) -> str:
    match label:
        case str():
            return label
        case bool():
            # A bool is an Integral too, but no answer.
            pass
        case Integral():
            return str(int(label))
        case Real() if math.isfinite(label):
            # Without an exponent, which answers do not have.
            return format(Decimal(repr(float(label))), "f")
    raise RewardError(
        f"reward {reward!r}: {place(prompt)} has the label {label!r} ({type(label).__name__}); "
        "it must be text, a finite number, or a list of these."
    )
