"""WrittenTokens: finds the tokens that engines generated in the samples that a function returns.

Old functions return log-probs and policy versions, or none. Recorded here, they are reliable: which tokens were sampled, from
which context, and by which policy.
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
    """Where the T tokens of a sample come from."""

    log_probs: npt.NDArray[np.float32]
    """(T,) nats; 0 where unknown."""
    known: npt.NDArray[np.bool_]
    """(T,) whether an engine generated this token after exactly the tokens before it."""
    spans: tuple[VersionSpan, ...]
    """Positions in the sample, not in its response."""
    routed_experts: RoutedExperts | None


class WrittenTokens:
    def __init__(self, kept: Sample | None) -> None:
        """`kept`: a sample that was generated before, such as that of a partial rollout."""
        self._kept = kept
        self._completions: list[tuple[npt.NDArray[np.int32], Completion]] = []

    def add(self, context: npt.NDArray[np.int32], completion: Completion) -> None:
        self._completions.append((context, completion))

    @property
    def versions(self) -> list[int]:
        of_kept = [] if self._kept is None else [span.version for span in self._kept.spans]
        return of_kept + [span.version for _, completion in self._completions for span in completion.spans]

    def find(self, tokens: npt.NDArray[np.int32]) -> Found:
        """Matches each completion up to the first token that differs: functions may cut off its end."""
        log_probs = np.zeros(len(tokens), np.float32)
        known = np.zeros(len(tokens), np.bool_)
        spans: list[VersionSpan] = []
        experts: RoutedExperts | None = None
        kept = self._kept
        if kept is not None and (end := common_length(tokens, kept.tokens)) > (start := kept.prompt_length):
            # A conversion to train data may cut off the end of a response.
            log_probs[start:end], known[start:end] = kept.rollout_log_probs[: end - start], True
            spans += shifted(kept.spans, start, end)
            experts = None if kept.routed_experts is None else kept.routed_experts[: end - 1]
        for context, completion in self._completions:
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
    """Length of the longest common prefix."""
    length = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:length] != others[:length])
    return int(different[0]) if len(different) else length


def shifted(spans: Sequence[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Shifts spans by `start`, and cuts them at `end`."""
    moved = [VersionSpan(v, s + start, min(e + start, end)) for v, s, e in spans]
    return [span for span in moved if span.end > span.start]
