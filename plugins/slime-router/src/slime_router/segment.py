"""Segment: the tokens of one turn, linked to those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slime_core.types.sample import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Segment:
    """N tokens that follow those of `parent`. Immutable, so conversations with the same beginning share its segments."""

    parent: Segment | None
    token_ids: npt.NDArray[np.int32]
    """(N,)"""
    log_probs: npt.NDArray[np.float32]
    """(N,) nats, under the policy that sampled; 0 where the mask is 0."""
    sampled: bool
    """True: an engine sampled the tokens. False: the caller sent them."""
    spans: tuple[VersionSpan, ...] = ()
    """Policy versions of sampled tokens, counted from the segment's first token."""

    @classmethod
    def written(cls, parent: Segment | None, token_ids: npt.NDArray[np.int32]) -> Segment:
        """A segment of tokens that the caller sent."""
        return cls(parent=parent, token_ids=token_ids, log_probs=np.zeros(len(token_ids), np.float32), sampled=False)


class Exact(NamedTuple):
    """T tokens of a conversation, exactly as engines received and generated them."""

    token_ids: npt.NDArray[np.int32]
    """(T,)"""
    log_probs: npt.NDArray[np.float32]
    """(T,) nats; 0 where the mask is 0."""
    loss_mask: npt.NDArray[np.uint8]
    """(T,) 1 = an engine sampled it."""
    spans: tuple[VersionSpan, ...]
    """Policy versions of generated tokens, counted from the first token of the conversation."""


def chain(last: Segment | None) -> list[Segment]:
    """The segments from the first to `last`."""
    found: list[Segment] = []
    while last is not None:
        found.append(last)
        last = last.parent
    return found[::-1]


def token_ids_of(last: Segment | None) -> npt.NDArray[np.int32]:
    """(T,) token ids of all segments up to and including `last`."""
    return np.concatenate([np.empty(0, np.int32), *(segment.token_ids for segment in chain(last))])


def exact(last: Segment | None) -> Exact:
    """Tokens, log-probs, mask and spans of all segments up to and including `last`."""
    segments = chain(last)
    spans: list[VersionSpan] = []
    start = 0
    for segment in segments:
        spans += [VersionSpan(span.version, start + span.start, start + span.end) for span in segment.spans]
        start += len(segment.token_ids)
    masks = [np.full(len(segment.token_ids), segment.sampled, np.uint8) for segment in segments]
    log_probs = [segment.log_probs for segment in segments]
    return Exact(
        token_ids_of(last),
        np.concatenate([np.empty(0, np.float32), *log_probs]),
        np.concatenate([np.empty(0, np.uint8), *masks]),
        tuple(spans),
    )
