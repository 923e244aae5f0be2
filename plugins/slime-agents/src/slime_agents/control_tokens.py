"""ControlTokens: keeps control tokens out of text from outside, such as a tool's output.

A chat template marks turns with control tokens. If text from outside spells one, a tokenizer takes it for the token: a tool
could end its turn and write as the system. Here such text gets a mark inside each spelled control token before the template
renders it, and marked ones are tokenized as plain characters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from slime_core.types.trajectory import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK: Final = "\ufdd0"
"""Unicode reserves it for use inside a program."""
CHARS_PER_TOKEN: Final = 8
"""Guess with which the tokenization of a long text begins."""
SLACK: Final = 64
"""A beginning of a text may have this many tokens that the whole text has not, where it was cut."""


class ControlTokens:
    """The special tokens of a tokenizer, and the added tokens that its chat template writes: some models mark turns with tokens
    that are not special."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        template = template_text(tokenizer.chat_template)
        special = {token.content for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
        written = {token.content for token in added.values() if token.content in template}
        self._special = any_of(special)
        self._control = any_of(special | written)
        self._known = any_of([*map(marked, special | written), *special, *written])
        ids = [number for number, token in added.items() if token.content in special | written]
        self.written_ids = frozenset(number for number, token in added.items() if token.content in written)
        """Added tokens that the chat template writes."""
        self._ids = np.unique(np.array([*ids, *tokenizer.all_special_ids], np.int32))
        self._special_ids = {token.content: number for number, token in added.items() if token.special}
        self._special_ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    def plain(self, text: str) -> str:
        """Marks all control tokens in a text from outside."""
        return self._control.sub(lambda found: marked(found[0]), text)

    def plain_response(self, text: str) -> str:
        """Marks only special tokens, in a text of the role assistant: templates look for other tokens there, such as
        those around thoughts."""
        return self._special.sub(lambda found: marked(found[0]), text)

    def between(self, before: str, text: str, after: str) -> npt.NDArray[np.int32]:
        """Tokens of a text from outside between two texts of the run file, whose control tokens are tokenized as such."""
        # What a program printed may be no valid Unicode.
        inside = self.plain(text.encode(errors="replace").decode())
        return np.concatenate([self.encode(before), self.encode(inside), self.encode(after)])

    def plain_values(self, value: Any) -> Any:
        """Marks all texts in a JSON value, keys included."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self.plain(str(key)): self.plain_values(inner) for key, inner in value.items()}
        if isinstance(value, Sequence):
            return [self.plain_values(inner) for inner in value]
        return value

    def unmarked(self, text: str) -> str:
        return self._known.sub(lambda found: found[0].replace(MARK, ""), text) if MARK in text else text

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The text of tokens. Control tokens that they spell out are marked."""
        text = decode(self._tokenizer, token_ids)
        places = np.flatnonzero(np.isin(token_ids, self._ids))
        if len(self._control.findall(text)) == len(places):
            return text
        texts: list[str] = []
        start = 0
        for place in [*places.tolist(), len(token_ids)]:
            texts.append(self.plain(decode(self._tokenizer, token_ids[start:place])))
            texts.append(decode(self._tokenizer, token_ids[place : place + 1]))
            start = place + 1
        return "".join(texts)

    def readable(self, token_ids: npt.NDArray[np.int32], *, tags: Collection[str]) -> str:
        """The text of tokens without special ones, except those of `tags`."""
        hidden = [number for text, number in self._special_ids.items() if text not in tags]
        return decode(self._tokenizer, token_ids[~np.isin(token_ids, hidden)])

    def encode_at_most(self, text: str, most: int | None) -> npt.NDArray[np.int32] | None:
        """`encode`, or None if there are more than `most` tokens. A text that is too long is tokenized only as far as shows
        it."""
        if most is None:
            return self.encode(text)
        length = CHARS_PER_TOKEN * max(0, most) + SLACK
        while length < len(text):
            if len(self.encode(text[:length])) > most + SLACK:
                return None
            length *= 4
        tokens = self.encode(text)
        return tokens if len(tokens) <= most else None

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """(T,) int32 tokens of a text that may have marks."""
        found = [(match.span(), MARK in match[0]) for match in self._known.finditer(text)]
        written = [span for span, is_marked in found if not is_marked]
        if len(written) == len(found):
            tokens = self._tokens(text)
            # A normalizer may have made control tokens of other characters.
            if np.isin(tokens, self._ids).sum() <= len(written):
                return tokens
        # Between two control tokens that the template wrote, there is only plain text.
        parts = [np.empty(0, np.int32)]
        start = 0
        for first, end in [*written, (len(text), len(text))]:
            parts.append(self._plain_tokens(text[start:first]))
            if end > first:
                parts.append(self._tokens(text[first:end]))
            start = end
        return np.concatenate(parts)

    def _plain_tokens(self, text: str) -> npt.NDArray[np.int32]:
        if MARK not in text:
            return self._tokens(text, split_special_tokens=True)
        tokens = self._tokens(self.unmarked(text), split_special_tokens=True)
        if not np.isin(tokens, self._ids).any():
            return tokens
        # Added tokens that are not special cannot be split otherwise.
        return np.concatenate([self._tokens(part, split_special_tokens=True) for part in text.split(MARK)])

    def _tokens(self, text: str, *, split_special_tokens: bool = False) -> npt.NDArray[np.int32]:
        options = {"split_special_tokens": True} if split_special_tokens else {}
        return np.array(self._tokenizer.encode(text, add_special_tokens=False, verbose=False, **options), np.int32)


def marked(token: str) -> str:
    return f"{token[:1]}{MARK}{token[1:]}"


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest if several begin at a place."""
    longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def template_text(template: Any) -> str:
    """The chat template, or all of them if there are several by name."""
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return str(template or "")
