"""The reward of ReTool: the answer in a box at the end, with a smaller penalty after tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slime_core.contracts.reward import Reward, RewardValue
from slime_core.types.sample import SampleGroup

BOX: Final = "\\boxed{"
LEAST_BAD: Final = -0.6
PER_CALL: Final = 0.05
FREE_CALLS: Final = 2


class BoxedReward(Reward):
    """1 for a right answer, else min(-0.6, -1 + 0.05 (calls - 2)), and never below -1."""

    def __init__(self, shown_characters: int) -> None:
        self._shown_characters = shown_characters

    def score(self, group: SampleGroup) -> Sequence[RewardValue]:
        label = str(group.prompt.label).strip()
        values: list[RewardValue] = []
        for sample in group.samples:
            is_right = last_box(sample.response[-self._shown_characters :]) == label
            calls = int(sample.metadata.get("tool_calls", 0))
            tried = min(LEAST_BAD, -1.0 + PER_CALL * max(0, calls - FREE_CALLS))
            values.append({"score": 1.0 if is_right else tried, "acc": float(is_right)})
        return values


def last_box(text: str) -> str | None:
    """The content of the last box, with matched braces inside. None if no box is closed."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(BOX) : position].strip()
    return None
