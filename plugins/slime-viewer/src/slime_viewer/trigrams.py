"""Trigrams: a signature of each text, so that a search reads only texts that may hold its words.

A text's signature has NUM_BITS bits; each sequence of three bytes of the text (letters as small ones) sets two. A text can hold
a word only if the bits of all trigrams of the word are set. Signatures of many texts are stored by bit: (NUM_BITS, texts / 8)
bytes, so that a word of ten letters reads sixteen rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

UInt8 = npt.NDArray[np.uint8]

NUM_BITS: Final = 4096
"""A text of 1 kB sets a quarter of them."""
LENGTH: Final = 3
_MULTIPLIERS: Final = (np.uint32(2654435761), np.uint32(2246822519))
"""A bit of each trigram for each of them: one in twenty texts has both bits of a trigram by chance."""
_SHIFT: Final = np.uint32(32 - 12)


def folded(text: str) -> str:
    """What is compared: letters as small ones."""
    return text.lower()


def bits_of(text: bytes) -> npt.NDArray[np.uint32]:
    """The bits of each trigram of a folded text, (2 x (bytes - 2),)."""
    codes = np.frombuffer(text, np.uint8).astype(np.uint32)
    if len(codes) < LENGTH:
        return np.empty(0, np.uint32)
    trigrams = codes[:-2] | (codes[1:-1] << np.uint32(8)) | (codes[2:] << np.uint32(16))
    return np.concatenate([(trigrams * multiplier) >> _SHIFT for multiplier in _MULTIPLIERS])


def signatures(texts: Iterable[bytes], count: int) -> npt.NDArray[np.bool_]:
    """(NUM_BITS, count) of folded texts."""
    found = np.zeros((NUM_BITS, count), np.bool_)
    for number, text in enumerate(texts):
        found[bits_of(text), number] = True
    return found


def by_bit(found: npt.NDArray[np.bool_]) -> UInt8:
    """(NUM_BITS, ceil(texts / 8)), the first text in the highest bit."""
    return np.packbits(found, axis=1)


def word_bits(words: Iterable[str]) -> list[int]:
    """The bits that a text with all these folded words has; empty if no word is long enough to have a trigram."""
    return sorted({int(bit) for word in words for bit in bits_of(word.encode())})
