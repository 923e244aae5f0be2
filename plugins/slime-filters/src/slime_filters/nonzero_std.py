"""nonzero_std: keeps groups whose rewards differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime_core.contracts.filter import FilterDecision, GroupFilter

if TYPE_CHECKING:
    from slime_core.types.sample import SampleGroup

KEEP = FilterDecision(keep=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonzeroStdFilter(GroupFilter):
    """Uses the population standard deviation in float64. It is 0 for one reward, so a group of one is dropped.

    (The sample standard deviation would be undefined there. For larger groups both are zero in the same cases.)
    """

    min_std: float
    keep_when_insufficient: bool

    def decide(self, group: SampleGroup) -> FilterDecision:
        rewards = np.asarray(group.rewards, np.float64)
        if rewards.size and float(rewards.std()) > self.min_std:
            return KEEP
        # One decimal keeps the number of metrics small; adding 0.0 turns -0.0 into 0.0.
        reason = f"zero_std_{round(float(rewards[0]), 1) + 0.0}" if rewards.size else "unscored"
        return FilterDecision(keep=False, reason=reason, keep_when_insufficient=self.keep_when_insufficient)
