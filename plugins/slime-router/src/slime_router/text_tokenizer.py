"""A tokenizer as the radix cache needs it: text to tokens and back, in the middle of a conversation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from slime_core.errors import ModelError
from slime_core.registry.boundary import held


class TextTokenizer:
    """Wraps a fast tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """(N,) token ids, without those that the tokenizer would add at the start or the end."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, token_ids: npt.NDArray[np.int32]) -> str:
        """The text with special tokens; an incomplete character becomes one replacement character, as in engines."""
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))

    def num_special_at_end(self, token_ids: npt.NDArray[np.int32]) -> int:
        """How many tokens at the end are special ones, such as the end of a turn."""
        number = 0
        while number < len(token_ids) and int(token_ids[-1 - number]) in self._special:
            number += 1
        return number


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Raises ModelError if there is no fast tokenizer, or one that cannot continue a text."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder}: no tokenizer.json there. The radix cache requires a fast tokenizer. Write one that transformers can "
            "load with AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    # The library raises nothing more precise than Exception.
    with held() as failed:
        tokenizer = Tokenizer.from_file(str(file))
    if failed.error is not None:
        raise ModelError(f"{file}: not a tokenizer: {failed.error}") from failed.error
    # The file may set padding or truncation, which must not apply in the middle of a conversation.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pieces = TextTokenizer(tokenizer)
    probe = pieces.encode("a")
    if len(probe) and pieces.decode(np.concatenate([probe, probe])) == "a a":
        raise ModelError(
            f"{file}: writes a space before every piece of text, so a conversation cannot be continued in pieces. The "
            "radix cache requires a byte-level tokenizer, as models since Llama 3 and Qwen have."
        )
    return pieces
