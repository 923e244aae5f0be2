"""Reward dapo: the last "Answer: ..." line near the end of the response, +1 or -1 (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.reward import Reward
from slime_rm_math.boxed import last_boxed
from slime_rm_math.label import accepted_answers
from slime_rm_math.normal_form import normal_form

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup

_ANSWER = re.compile(r"answer\s*:\s*([^\r\n]+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DapoReward(Reward):
    window_chars: int

    def score(self, group: SampleGroup) -> Sequence[Mapping[str, float]]:
        """`score` (+1 right, -1 wrong) and `acc` (1, 0) for each sample. RewardError for an unusable label."""
        labels = {final_form(label) for label in accepted_answers(group.prompt, reward="dapo")} - {""}
        right = [last_answer(sample.response, window_chars=self.window_chars) in labels for sample in group.samples]
        return [{"score": 1.0, "acc": 1.0} if hit else {"score": -1.0, "acc": 0.0} for hit in right]


def last_answer(response: str, *, window_chars: int) -> str | None:
    """The normal form of the last answer line within the last `window_chars` characters; None without one."""
    matches = _ANSWER.findall(response[-window_chars:])
    return final_form(matches[-1]) if matches else None


def final_form(text: str) -> str:
    """The answer without its box, Markdown emphasis and everything up to the last equals sign, in normal form.

    Integers are spelled in one way, so that 42, 42.0 and 042 are the same.
    """
    text = last_boxed(text) or text
    return normal_form(text.rpartition("=")[2].strip(" \t*_`"))
