"""length: keeps groups by the length of their responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.types.sample import Status

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFilter(GroupFilter):
    """Lengths are response tokens, tool tokens included. Checks all samples, scored or not."""

    min_response_len: int
    max_response_len: int | None
    max_truncated_ratio: float
    keep_when_insufficient: bool

    def decide(self, group: SampleGroup) -> FilterDecision:
        reason = self._reason(group)
        return FilterDecision(
            keep=not reason, reason=reason, keep_when_insufficient=bool(reason) and self.keep_when_insufficient
        )

    def _reason(self, group: SampleGroup) -> str:
        lengths = [sample.response_length for sample in group.samples]
        num_truncated = sum(sample.status is Status.TRUNCATED for sample in group.samples)
        if num_truncated > self.max_truncated_ratio * len(lengths):
            return "truncated"
        if self.max_response_len is not None and max(lengths, default=0) > self.max_response_len:
            return "too_long"
        return "too_short" if min(lengths, default=0) < self.min_response_len else ""
