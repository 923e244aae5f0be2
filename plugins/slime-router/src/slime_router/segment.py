"""Segment: the tokens of one turn, linked to those before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slime_core.types.sample import VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Segment:
    """N tokens that follow those of `parent`. Never changed, so conversations that begin alike share their beginning."""

    parent: Segment | None
    token_ids: npt.NDArray[np.int32]
    """(N,)"""
    log_probs: npt.NDArray[np.float32]
    """(N,) nats, under the policy that sampled; 0 where the mask is 0."""
    sampled: bool
    """By an engine; else the caller wrote them."""
    spans: tuple[VersionSpan, ...] = ()
    """Of sampled tokens, counted from the segment's first."""

    @classmethod
    def written(cls, parent: Segment | None, token_ids: npt.NDArray[np.int32]) -> Segment:
        """What the caller wrote."""
        return cls(parent=parent, token_ids=token_ids, log_probs=np.zeros(len(token_ids), np.float32), sampled=False)


class Exact(NamedTuple):
    """T tokens of a conversation, as the engines saw and wrote them."""

    token_ids: npt.NDArray[np.int32]
    """(T,)"""
    log_probs: npt.NDArray[np.float32]
    """(T,) nats; 0 where the mask is 0."""
    loss_mask: npt.NDArray[np.uint8]
    """(T,) 1 = an engine sampled it."""
    spans: tuple[VersionSpan, ...]
    """Which policy version wrote which tokens, counted from the first token of all."""


def chain(last: Segment | None) -> list[Segment]:
    """From the first to the last."""
    found: list[Segment] = []
    while last is not None:
        found.append(last)
        last = last.parent
    return found[::-1]


def token_ids_of(last: Segment | None) -> npt.NDArray[np.int32]:
    """(T,) of everything up to and including `last`."""
    return np.concatenate([np.empty(0, np.int32), *(segment.token_ids for segment in chain(last))])


def exact(last: Segment | None) -> Exact:
    """Everything up to and including `last`."""
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
