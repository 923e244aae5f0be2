"""exact_match: compares the answer with the label."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Final

from slime_core.contracts.reward import Reward
from slime_core.errors import RewardError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SampleGroup
from slime_search_r1.tags import is_well_formed, last_answer

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


class ExactMatchReward(Reward):
    """Scores `exact_match` (1 or 0), `well_formed` (1 or 0), and `score`, which is Search-R1's reward: 1 for a right answer,
    minus `format_score` if the tags are not well-formed; `format_score` for a wrong answer, or none, with well-formed tags."""

    def __init__(self, format_score: float) -> None:
        self._format_score = format_score

    def score(self, group: SampleGroup) -> Sequence[Mapping[str, float]]:
        golden = {normalized(label) for label in labels_of(group.prompt)}
        # Models have tags that are special tokens.
        return [self._score(sample.raw_response, golden) for sample in group.samples]

    def _score(self, response: str, golden: set[str]) -> Mapping[str, float]:
        answer = last_answer(response)
        right = answer is not None and normalized(answer) in golden
        in_order = is_well_formed(response)
        without_order = 1.0 - self._format_score if right else 0.0
        with_order = 1.0 if right else self._format_score
        score = with_order if in_order else without_order
        return {"score": score, "exact_match": float(right), "well_formed": float(in_order)}


def labels_of(prompt: Prompt) -> list[str]:
    """The labels of a prompt. RewardError if it has none."""
    labels = prompt.label if isinstance(prompt.label, list) else [prompt.label]
    if not labels or not all(isinstance(label, str) for label in labels):
        raise RewardError(
            f"{prompt.origin or 'a prompt'}: exact_match requires a text as label, or a list of texts, each of which is right; "
            f"found {prompt.label!r}. Pass its column: --label-key."
        )
    return labels


def normalized(answer: str) -> str:
    """Normalizes an answer as SQuAD does (Rajpurkar et al., 1606.05250): without case, punctuation, articles and extra spaces.

    >>> normalized("The  Eiffel-Tower.")
    'eiffeltower'
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_WITHOUT_PUNCTUATION)).split())
