"""Removes a partial stop string from the end of an aborted response.

Engines search for stop strings only in their own output, so another engine would not recognize the rest of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from slime_core.types.completion import Completion
from slime_core.types.sample import VersionSpan
from slime_core.types.trajectory import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS_PER_CHARACTER: Final = 4
"""Upper bound: the bytes of a character in UTF-8."""


def strip_partial_stop(completion: Completion, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Completion:
    """Returns the completion without tokens at its end that may begin one of `stops`; they are generated again."""
    longest = max((len(stop) for stop in stops), default=0)
    end = completion.token_ids[-TOKENS_PER_CHARACTER * longest :]
    if longest < 2 or not len(end):
        return completion
    text = decode(tokenizer, end)
    begun = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    if not begun:
        return completion
    given_up = 1
    while given_up < len(end) and len(decode(tokenizer, end[:-given_up])) > len(text) - begun:
        given_up += 1
    length = len(completion.token_ids) - given_up
    return replace(
        completion,
        token_ids=completion.token_ids[:length],
        log_probs=completion.log_probs[:length],
        spans=tuple(
            VersionSpan(span.version, span.start, min(span.end, length))
            for span in completion.spans
            if span.start < length
        ),
    )
