"""The piece of text of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE: Final = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""


def token_pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """One for each token. A character of several tokens is in the last of them, the others are empty."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return pieces_by_windows(tokenizer, ids)
    stream = DecodeStream(skip_special_tokens=False)
    pieces = [stream.step(backend, token) or "" for token in ids]
    return with_rest(tokenizer, ids, pieces)


def pieces_by_windows(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """For tokenizers in Python: each token is decoded after the last ones that made whole characters."""
    pieces: list[str] = []
    start, whole = 0, 0
    for end in range(1, len(ids) + 1):
        before = str(tokenizer.decode(ids[start:whole]))
        text = str(tokenizer.decode(ids[start:end]))
        if text.endswith(INCOMPLETE) or len(text) < len(before):
            pieces.append("")
        else:
            pieces.append(text[len(before) :])
            start, whole = whole, end
    return with_rest(tokenizer, ids, pieces)


def with_rest(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], pieces: list[str]) -> list[str]:
    """A response that was cut within a character ends with what the decoder writes for it."""
    last = max((place + 1 for place, piece in enumerate(pieces) if piece), default=0)
    if pieces and last < len(pieces):
        pieces[-1] = str(tokenizer.decode(ids[last:]))
    return pieces
