"""Reward f1: token F1 of answer and label, as in SQuAD and HotpotQA (arXiv:1606.05250, arXiv:1809.09600)."""

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
"""Answers that must match exactly."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class F1Reward(Reward):
    graded: Graded

    def score(self, group: SampleGroup) -> Sequence[float]:
        """F1 of each sample, in [0, 1]; with several labels the best one."""
        labels = [normalized(text) for text in texts_of(group.prompt, reward="f1")]
        answers = [normalized(self.graded.part(sample)) for sample in group.samples]
        return [max((f1(answer, label) for label in labels), default=0.0) for answer in answers]


def normalized(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra spaces.

    >>> normalized("The Eiffel-Tower, a tower")
    'eiffeltower tower'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, label: str) -> float:
    """2 P R / (P + R) of the words, counted with multiplicity."""
    if answer != label and (answer in EXACT or label in EXACT):
        return 0.0
    words, label_words = answer.split(), label.split()
    shared = (Counter(words) & Counter(label_words)).total()
    return 2.0 * shared / (len(words) + len(label_words)) if shared else 0.0
