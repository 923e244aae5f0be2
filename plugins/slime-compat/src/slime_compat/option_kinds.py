"""Kind: how many values a flag takes, and of which type."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from slime_compat.flag_words import number


class Kind(Enum):
    SWITCH = "switch"
    INTEGER = "integer"
    NUMBER = "number"
    TEXT = "text"
    INTEGERS = "integers"
    TEXTS = "texts"

    def read(self, words: Sequence[str], *, negated: bool = False) -> Any:
        """The value that these words give. ValueError if they give none."""
        if self is Kind.SWITCH:
            return not negated and (not words or words[-1].lower() == "true")
        if not words:
            raise ValueError("requires a value")
        if self is Kind.TEXTS:
            return list(words)
        if self is Kind.INTEGERS:
            return [number(word, int) for word in words]
        if self is Kind.TEXT:
            return words[-1]
        return number(words[-1], int if self is Kind.INTEGER else float)
