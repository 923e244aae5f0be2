"""overlong_filter: masks responses that reached the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.types.sample import Status

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup


class OverlongFilter(GroupFilter):
    """Keeps every group. Samples that reached the length limit count in its statistics, but their tokens have mask 0: a cut
    response might have become right, so its reward is noise.

    Source: arXiv:2503.14476 (DAPO), section 3.4, overlong filtering.
    """

    def decide(self, group: SampleGroup) -> FilterDecision:
        cut = (position for position, sample in enumerate(group.samples) if sample.status is Status.TRUNCATED)
        return FilterDecision(keep=True, masked_indices=tuple(cut))
