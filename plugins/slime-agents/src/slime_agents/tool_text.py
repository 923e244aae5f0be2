"""Text that a tool or another agent wrote, as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def own_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Of text that the run's author wrote, such as a tag: what looks like a special token is one."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def foreign_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Of text from outside: it may not contain special tokens, or a tool could end the turn or speak for the user."""
    text = text.encode(errors="replace").decode()
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def between(tokenizer: PreTrainedTokenizerBase, before: str, text: str, after: str) -> npt.NDArray[np.int32]:
    tokens = [*own_tokens(tokenizer, before), *foreign_tokens(tokenizer, text), *own_tokens(tokenizer, after)]
    return np.array(tokens, np.int32)


def shortened(text: str, most: int) -> str:
    """Its beginning and its end, where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}...{text[len(text) - (most - head) :]}"
