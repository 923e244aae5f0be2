"""Graded: the part of a response that is graded."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.types.sample import Sample
from slime_rm_hub.config import GradedConfig

_OPENINGS = ("\\boxed{", "\\fbox{")


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Selects the text after the reasoning, and with `boxed` only its last box."""

    think_end: str
    boxed: bool

    @classmethod
    def from_config(cls, config: GradedConfig) -> Graded:
        return cls(think_end=config.think_end, boxed=config.boxed)

    def part(self, sample: Sample) -> str:
        """The text to grade. Empty with `boxed` if the response has no box."""
        text = sample.response
        if self.think_end not in text and self.think_end in sample.raw_response:
            # The tokenizer calls the mark special.
            text = sample.raw_response
        text = text.rpartition(self.think_end)[2]
        return last_boxed(text) if self.boxed else text


def last_boxed(text: str) -> str:
    """The content of the last closed \\boxed{}; empty without one.

    >>> last_boxed(r"\\boxed{1} or \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    end = len(text)
    while end > 0:
        start, opening = max((text.rfind(opening, 0, end), opening) for opening in _OPENINGS)
        if start < 0:
            return ""
        depth, first = 1, start + len(opening)
        for at in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[first:at].strip()
        end = start
    return ""
