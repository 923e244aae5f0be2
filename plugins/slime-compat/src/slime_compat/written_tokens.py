"""WrittenTokens: what the engines wrote in one episode, found again in the samples that come of it.

Old functions keep log-probs and versions themselves, or not at all. Which tokens of a sample were sampled, from which
context and by which policy, is known better here than from what they return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slime_core.types.completion import Completion
from slime_core.types.routed_experts import RoutedExperts
from slime_core.types.sample import Sample, VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Of a sample of T tokens."""

    log_probs: npt.NDArray[np.float32]
    """(T,) nats; 0 where unknown."""
    known: npt.NDArray[np.bool_]
    """(T,) an engine wrote this token behind exactly the tokens before it."""
    spans: tuple[VersionSpan, ...]
    """Over positions of the sample, not of its response."""
    routed_experts: RoutedExperts | None


class WrittenTokens:
    def __init__(self, kept: Sample | None) -> None:
        """`kept`: what a partial rollout left, which earlier episodes wrote."""
        self._kept = kept
        self._answers: list[tuple[npt.NDArray[np.int32], Completion]] = []

    def add(self, context: npt.NDArray[np.int32], completion: Completion) -> None:
        self._answers.append((context, completion))

    @property
    def versions(self) -> list[int]:
        of_kept = [] if self._kept is None else [span.version for span in self._kept.spans]
        return of_kept + [span.version for _, completion in self._answers for span in completion.spans]

    def find(self, tokens: npt.NDArray[np.int32]) -> Found:
        """An answer counts as far as its tokens are there: functions cut the end off."""
        log_probs = np.zeros(len(tokens), np.float32)
        known = np.zeros(len(tokens), np.bool_)
        spans: list[VersionSpan] = []
        experts: RoutedExperts | None = None
        kept = self._kept
        if kept is not None and np.array_equal(tokens[: len(kept.tokens)], kept.tokens):
            start, end = kept.prompt_length, len(kept.tokens)
            log_probs[start:end], known[start:end] = kept.rollout_log_probs, True
            spans += shifted(kept.spans, start, end)
            experts = kept.routed_experts
        for context, completion in self._answers:
            start = len(context)
            if start > len(tokens) or not np.array_equal(tokens[:start], context):
                continue
            length = common_length(tokens[start:], completion.token_ids)
            end = start + length
            log_probs[start:end], known[start:end] = completion.log_probs[:length], True
            spans += shifted(completion.spans, start, end)
            if completion.routed_experts is not None and length:
                experts = completion.routed_experts[: end - 1]
        return Found(log_probs, known, tuple(sorted(spans, key=lambda span: span.start)), experts)


def common_length(tokens: npt.NDArray[np.int32], others: npt.NDArray[np.int32]) -> int:
    """Of the longest beginning that both have."""
    length = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:length] != others[:length])
    return int(different[0]) if len(different) else length


def shifted(spans: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """By `start`, and cut off at `end`."""
    moved = [VersionSpan(v, s + start, min(e + start, end)) for v, s, e in spans]
    return [span for span in moved if span.end > span.start]
