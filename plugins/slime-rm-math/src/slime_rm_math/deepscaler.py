"""Reward deepscaler: as math, for what follows the reasoning only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.reward import Reward
from slime_rm_math.math import boxed_labels, grade_boxed

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup

RESPONSE_MARK = "###Response"
"""Marks that some chat templates have instead of closing tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepScalerReward(Reward):
    think_end: str
    max_symbolic_chars: int

    def score(self, group: SampleGroup) -> Sequence[float]:
        """1.0 or 0.0 for each sample. RewardError for a label that cannot be used."""
        labels = boxed_labels(group.prompt, reward="deepscaler")
        return [
            grade_boxed(
                after_thinking(sample.raw_response, self.think_end), labels, max_symbolic_chars=self.max_symbolic_chars
            )
            for sample in group.samples
        ]


def after_thinking(response: str, think_end: str) -> str:
    """The text after the last `think_end`, or else after the last response mark; empty if the reasoning never ends."""
    for mark in (think_end, RESPONSE_MARK):
        _, found, rest = response.rpartition(mark)
        if found:
            return rest
    return ""
