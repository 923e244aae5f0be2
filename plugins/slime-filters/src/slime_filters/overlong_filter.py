"""overlong_filter: answers that were cut off train nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.contracts.filter import FilterDecision, GroupFilter
from slime_core.types.sample import Status

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup


class OverlongFilter(GroupFilter):
    """Keeps every group. Samples that hit the length limit count in its statistics, but their tokens have mask 0: whether
    a cut answer would have been right is not known, so its reward is noise.

    Source: arXiv:2503.14476 (DAPO), section 3.4, overlong filtering.
    """

    def decide(self, group: SampleGroup) -> FilterDecision:
        cut = (position for position, sample in enumerate(group.samples) if sample.status is Status.TRUNCATED)
        return FilterDecision(keep=True, untrained=tuple(cut))
