"""The piece of text of each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from slime_core.data.model_folder import load_tokenizer
from slime_core.errors import ModelError

Decoder = Callable[[Sequence[int]], str]
"""The text of token ids, with special tokens."""

TOKENIZER: Final = "tokenizer.json"
INCOMPLETE: Final = "\ufffd"
"""What a decoder writes for bytes that are no whole character."""


def open_decoder(folder: Path) -> Decoder:
    """The folder's tokenizer. Where there is its file for the library tokenizers, transformers is not imported, which takes
    seconds. ModelError if it cannot be read; code in the folder is never run."""
    file = folder / TOKENIZER
    if not file.is_file():
        transformers_tokenizer = load_tokenizer(folder, trust_remote_code=False)
        return lambda ids: str(transformers_tokenizer.decode(list(ids), skip_special_tokens=False))
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except Exception as error:
        # The library raises plain Exceptions.
        raise ModelError(f"{file}: cannot be read: {error}") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def token_pieces(decode: Decoder, ids: Sequence[int]) -> list[str]:
    """One for each token; together they are the text. A character of several tokens is in the last of them.

    Each token is decoded after those before it that made whole characters: some decoders write a space before a word only
    there.
    """
    pieces: list[str] = []
    start, whole = 0, 0
    before = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith(INCOMPLETE) or len(text) < len(before):
            pieces.append("")
            continue
        pieces.append(text[len(before) :])
        start, whole = whole, end
        before = decode(ids[start:whole])
    if whole < len(ids):
        # Cut within a character: what the decoder writes for its bytes.
        pieces[-1] = decode(ids[start:])[len(before) :]
    return pieces
