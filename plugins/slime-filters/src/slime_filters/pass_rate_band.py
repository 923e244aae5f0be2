"""pass_rate_band: keeps groups whose pass rate is inside a band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.contracts.filter import FilterDecision, GroupFilter

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateBandFilter(GroupFilter):
    """The pass rate is the share of scored samples with a reward of at least `pass_reward`."""

    min_pass_rate: float
    max_pass_rate: float
    pass_reward: float
    keep_when_insufficient: bool

    def decide(self, group: SampleGroup) -> FilterDecision:
        reason = self._reason(group.rewards)
        return FilterDecision(
            keep=not reason, reason=reason, keep_when_insufficient=bool(reason) and self.keep_when_insufficient
        )

    def _reason(self, rewards: list[float]) -> str:
        if not rewards:
            return "unscored"
        pass_rate = sum(reward >= self.pass_reward for reward in rewards) / len(rewards)
        if pass_rate < self.min_pass_rate:
            return "pass_rate_low"
        return "pass_rate_high" if pass_rate > self.max_pass_rate else ""
