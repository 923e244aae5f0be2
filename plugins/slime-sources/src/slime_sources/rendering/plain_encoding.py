"""Tokens of a text without special ones around it, as transformers' `encode` gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> npt.NDArray[np.int32]:
    """(T,) int32. A fast tokenizer whose `encode` is transformers' own is asked directly where the wrapper would only pass the
    text on: that takes a tenth of the time, and every prompt of a run is encoded."""
    if passes_on(tokenizer):
        ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    else:
        ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return np.array(ids, np.int32)


def passes_on(tokenizer: PreTrainedTokenizerBase) -> bool:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not issubclass(kind, PreTrainedTokenizerFast) or kind.encode is not PreTrainedTokenizerBase.encode:
        return False
    if kind._encode_plus is not PreTrainedTokenizerFast._encode_plus:
        return False
    # The wrapper sets these three before each text; an earlier call may have left others.
    backend = tokenizer.backend_tokenizer
    return (
        backend.truncation is None
        and backend.padding is None
        and backend.encode_special_tokens == tokenizer.split_special_tokens
    )
