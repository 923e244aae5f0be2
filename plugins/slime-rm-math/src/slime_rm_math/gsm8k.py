"""Reward gsm8k: the number that a response ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from slime_core.contracts.reward import Reward
from slime_core.errors import RewardError
from slime_rm_math.boxed import last_boxed
from slime_rm_math.label import accepted_answers, place
from slime_rm_math.normal_form import fraction_parts, normal_form
from slime_rm_math.numeral import numbers_in, value

if TYPE_CHECKING:
    from slime_core.types.prompt import Prompt
    from slime_core.types.sample import SampleGroup

MARK = "####"
"""Precedes the final answer in GSM8K's solutions (arXiv:2110.14168)."""
_MAX_ANSWER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Gsm8kReward(Reward):
    def score(self, group: SampleGroup) -> Sequence[float]:
        """1.0 or 0.0 for each sample. RewardError for a label without a number."""
        labels = {_label_number(label, group.prompt) for label in accepted_answers(group.prompt, reward="gsm8k")}
        return [float(final_number(sample.response) in labels) for sample in group.samples]


def final_number(response: str) -> Fraction | None:
    """The number in the last box, else the one after the last "####", else the last of the text; commas and dollar
    signs do not count. The first of these places that exists decides: None if it holds no number."""
    boxed = last_boxed(response)
    if boxed is not None:
        return _answer_number(boxed)
    _, marked, rest = response.rpartition(MARK)
    if marked:
        return _marked_number(rest)
    numbers = numbers_in(_plain(response))
    return value(numbers[-1]) if numbers else None


def _label_number(label: str, prompt: Prompt) -> Fraction:
    number = _marked_number(label.rpartition(MARK)[2])
    if number is None:
        raise RewardError(
            f"reward 'gsm8k': the label of {place(prompt)} holds no number after {MARK!r}: {label[-80:]!r}."
        )
    return number


def _marked_number(text: str) -> Fraction | None:
    """An answer, or a sentence that names it first; on the first line that is not blank."""
    line = text.strip().partition("\n")[0]
    number = _answer_number(line)
    if number is not None:
        return number
    numbers = numbers_in(_plain(line))
    return value(numbers[0]) if numbers else None


def _answer_number(text: str) -> Fraction | None:
    """The number or fraction that `text`, or the right side of its last equation, is; None if it is more than that."""
    text = text.rpartition("=")[2]
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    normal = normal_form(text)
    if parts := fraction_parts(normal):
        top, bottom = parts
        return Fraction(top, bottom) if bottom else None
    numbers = numbers_in(_plain(normal))
    return value(numbers[0]) if len(numbers) == 1 and not set(normal) & set("\\^_/*") else None


def _plain(text: str) -> str:
    return text.replace("\\$", "").replace("$", "").replace("{,}", ",").replace("\\!", "").replace("−", "-")
