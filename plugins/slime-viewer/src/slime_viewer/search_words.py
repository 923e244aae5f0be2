"""SearchWords: what is searched for in texts, and where it is found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from slime_viewer.trigrams import folded, word_bits

EXCERPT: Final = 300
"""Characters that a table shows of a text."""
BEFORE: Final = 60
"""Characters before the first place, at most."""
RE2_SPECIAL: Final = re.compile(r"[^\w\s]|\\", re.ASCII)
_WORDS: Final = re.compile(r'"([^"]*)"?|(\S+)')


@dataclass(frozen=True, slots=True)
class SearchWords:
    """All of them must be in a sample's prompt or response, in capital or small letters."""

    words: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> SearchWords:
        """Words, or characters in quotes; a quote that is not closed reaches to the end."""
        found = (quoted or plain for quoted, plain in _WORDS.findall(text))
        return cls(tuple(dict.fromkeys(folded(word) for word in found if word)))

    @property
    def bits(self) -> list[int]:
        return word_bits(self.words)

    @property
    def patterns(self) -> list[str]:
        """A regular expression of RE2 for each word."""
        return [f"(?i){RE2_SPECIAL.sub(escaped, word)}" for word in self.words]

    def excerpt(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Part of a text around the first place of any word, else its start; and where words are in it, [start, end) in UTF-16
        units."""
        pattern = re.compile("|".join(re.escape(word) for word in self.words), re.IGNORECASE) if self.words else None
        first = pattern.search(text) if pattern else None
        start = 0 if first is None else max(0, first.start() - BEFORE)
        part = text[start : start + EXCERPT]
        found = [place.span() for place in pattern.finditer(part)] if pattern else []
        return part, [(utf16_length(part[:begin]), utf16_length(part[:end])) for begin, end in found]


def escaped(character: re.Match[str]) -> str:
    """ASCII punctuation with a backslash; letters of other alphabets need none."""
    return character[0] if ord(character[0]) > 127 else "\\" + character[0]


def utf16_length(text: str) -> int:
    """As JavaScript counts characters."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
