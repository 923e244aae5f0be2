"""Reward f1: the words that answer and label share, as in SQuAD and HotpotQA (arXiv:1606.05250, arXiv:1809.09600)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from slime_core.contracts.reward import Reward
from slime_core.types.sample import SampleGroup
from slime_rm_hub.label import texts_of
from slime_rm_hub.response import Graded

EXACT: Final = frozenset({"yes", "no", "noanswer"})
"""Answers that others do not share words with."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class F1Reward(Reward):
    graded: Graded

    def score(self, group: SampleGroup) -> Sequence[float]:
        """In [0, 1]; with several labels the best one counts."""
        labels = [normalised(text) for text in texts_of(group.prompt, reward="f1")]
        answers = [normalised(self.graded.part(sample.response)) for sample in group.samples]
        return [max((f1(answer, label) for label in labels), default=0.0) for answer in answers]


def normalised(text: str) -> str:
    """Lower case, without punctuation, articles and needless spaces.

    >>> normalised("The Eiffel-Tower, a tower")
    'eiffeltower tower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, label: str) -> float:
    """2 P R / (P + R) over the words, each counted as often as it occurs in both."""
    if answer != label and (answer in EXACT or label in EXACT):
        return 0.0
    words, wanted = answer.split(), label.split()
    shared = (Counter(words) & Counter(wanted)).total()
    return 2.0 * shared / (len(words) + len(wanted)) if shared else 0.0
