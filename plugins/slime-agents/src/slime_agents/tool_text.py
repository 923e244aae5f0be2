"""Tokenizes text that a tool or another agent wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def own_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of text from the run file, such as a tag. Special tokens in it are tokenized as such."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def foreign_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of text from outside. Special tokens in it are split, or a tool could end the turn or write as the user."""
    text = text.encode(errors="replace").decode()
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def between(tokenizer: PreTrainedTokenizerBase, before: str, text: str, after: str) -> npt.NDArray[np.int32]:
    tokens = [*own_tokens(tokenizer, before), *foreign_tokens(tokenizer, text), *own_tokens(tokenizer, after)]
    return np.array(tokens, np.int32)


def shortened(text: str, most: int) -> str:
    """Returns a text longer than `most` characters without its middle."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}...{text[len(text) - (most - head) :]}"
