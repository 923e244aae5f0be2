"""Reward gpqa: multiple choice, 1 if the response names the right letter (GPQA, arXiv:2311.12022)."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slime_core.contracts.reward import Reward
from slime_core.errors import RewardError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_rm_hub.label import label_of, place
from slime_rm_hub.response import Graded

LETTERS: Final = string.ascii_uppercase[:10]
# The letter must be a word of its own, or "the answer is Because" would name B.
_LETTER = r"(?:\W|\\(?:boxed|text|textbf|mathrm)\s*\{)*([A-Z])(?![A-Za-z0-9])"
_STATED = re.compile(rf"(?i:\b(?:answer|option|choice)\s*(?:is|:)){_LETTER}|\b([A-Z])\s+(?i:is\s+(?:the\s+)?correct)")
_ALONE = re.compile(r"(?<![A-Za-z0-9])([A-Z])(?![A-Za-z0-9])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choices of a prompt, and the right one."""

    letters: Sequence[str]
    right: str | None
    """The right letter; None if the label is a text that is none of the choices."""
    texts: frozenset[str]
    """Texts of the right answer, for responses that name no letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpqaReward(Reward):
    graded: Graded

    def score(self, group: SampleGroup) -> Sequence[float]:
        return [self._score(sample) for sample in group.samples]

    def _score(self, sample: Sample) -> float:
        choice = choice_of(sample.prompt, sample.metadata)
        text = self.graded.part(sample)
        letter = chosen_letter(text, choice.letters)
        if letter is not None and choice.right is not None:
            return float(letter == choice.right)
        words = f" {plain(text)} "
        return float(any(f" {answer} " in words for answer in choice.texts))


def choice_of(prompt: Prompt, metadata: Mapping[str, Any]) -> Choice:
    """Reads the label (a letter, its number from 0, or the right answer's text) and the metadata `choices` and
    `valid_letters`. RewardError if they do not identify the right choice."""
    label = label_of(prompt, reward="gpqa")
    offered = metadata.get("choices")
    texts = [str(text) for text in (offered.values() if isinstance(offered, Mapping) else offered or ())]
    letters = [str(letter).upper() for letter in metadata.get("valid_letters") or LETTERS[: len(texts) or None]]
    right: str | None = None
    if isinstance(label, str):
        spelled = label.strip()
        if spelled.upper() in letters:
            right = spelled.upper()
        else:
            same = [n for n, text in enumerate(texts) if plain(text) == plain(spelled)]
            right = letters[same[0]] if same and same[0] < len(letters) else None
            lone_letter = len(spelled) == 1 and spelled.isalpha()
            if not plain(spelled) or (right is None and lone_letter):
                raise unusable(prompt, label, letters)
    elif isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        right = letters[label]
    else:
        raise unusable(prompt, label, letters)
    answers = {label} if isinstance(label, str) and label.strip().upper() != right else set()
    if right is not None and letters.index(right) < len(texts):
        answers.add(texts[letters.index(right)])
    return Choice(letters=letters, right=right, texts=frozenset(plain(text) for text in answers) - {""})


def unusable(prompt: Prompt, label: object, letters: Sequence[str]) -> RewardError:
    return RewardError(
        f"reward 'gpqa': {place(prompt)} has the label {label!r}; it must be a letter of {', '.join(letters)}, its number "
        "from 0, or the text of the right answer."
    )


def chosen_letter(text: str, letters: Sequence[str]) -> str | None:
    """The last "answer is X" (or option, choice, "X is correct"), else the last letter that stands alone."""
    stated = [one or other for one, other in _STATED.findall(text)]
    for candidates in (stated, _ALONE.findall(text)):
        valid = [letter for letter in candidates if letter in letters]
        if valid:
            return valid[-1]
    return None


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
