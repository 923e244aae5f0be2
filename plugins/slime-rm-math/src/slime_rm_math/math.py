"""Reward math: the last boxed answer against the label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.reward import Reward
from slime_core.errors import RewardError
from slime_rm_math.answer import equal
from slime_rm_math.boxed import last_boxed
from slime_rm_math.label import accepted_answers, place

if TYPE_CHECKING:
    from slime_core.types.prompt import Prompt
    from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward(Reward):
    max_symbolic_chars: int

    def score(self, group: SampleGroup) -> Sequence[float]:
        """1.0 or 0.0 for each sample. RewardError for a label that cannot be used."""
        labels = boxed_labels(group.prompt, reward="math")
        return [
            grade_boxed(sample.response, labels, max_symbolic_chars=self.max_symbolic_chars) for sample in group.samples
        ]


def boxed_labels(prompt: Prompt, *, reward: str) -> tuple[str, ...]:
    """The accepted answers, each taken out of its box if it is in one. RewardError for a box that never closes."""
    return tuple(_unboxed(label, prompt, reward) for label in accepted_answers(prompt, reward=reward))


def grade_boxed(text: str, labels: Iterable[str], *, max_symbolic_chars: int) -> float:
    """1.0 if the last box of `text` equals one of `labels`, else 0.0; 0.0 without a box."""
    answer = last_boxed(text)
    if not answer:
        return 0.0
    return float(any(equal(answer, label, max_symbolic_chars=max_symbolic_chars) for label in labels))


def _unboxed(label: str, prompt: Prompt, reward: str) -> str:
    if "\\boxed" not in label and "\\fbox" not in label:
        return label
    content = last_boxed(label)
    if content is None:
        raise RewardError(f"reward {reward!r}: the box in the label of {place(prompt)} never closes: {label!r}.")
    return content
