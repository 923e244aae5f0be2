"""GroupNorm: rewards relative to the other rollouts of the same prompt.

Legend: S samples, N scored samples, M response tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_core.types.batch import Float64
from slime_estimators.comparison import RewardGroups

STD_EPSILON = 1e-6
ROUNDING = 1e-9
"""Of the mean reward of a group: a smaller std is none."""


class GroupNorm(AdvantageEstimator):
    """c_i = (r_i - mean) / (std + 1e-6), the same at every token of the sample.

    Mean and std (n - 1) are over the rollouts of the group, each counted once (`RewardGroups`). Groups of one rollout and
    groups with equal rewards get exactly 0. Samples without a reward (NaN) get 0 and are left out of the statistics.

    Source: arXiv:2402.03300, section 4.1.2; without the std: arXiv:2503.20783, section 3.
    """

    def __init__(self, *, subtract_mean: bool = True, divide_by_std: bool = True) -> None:
        self._subtract_mean = subtract_mean
        self._divide_by_std = divide_by_std

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        metrics: dict[str, float] = {}
        if self._subtract_mean:
            compared = RewardGroups.of(batch, inputs.rewards)
            credit_S = compared.credit(self._relative(compared))
            metrics["rollout/singleton_groups"] = float(compared.num_singletons)
        else:
            credit_S = np.where(np.isnan(inputs.rewards), 0.0, inputs.rewards)
        advantages_M = batch.per_token(credit_S.astype(np.float32))
        return Credit(advantages=advantages_M, sample_credit=credit_S, metrics=metrics)

    def _relative(self, compared: RewardGroups) -> Float64:
        """(N,)"""
        if not self._divide_by_std:
            return compared.deviation
        # Where rollouts have equal rewards, samples inside one may differ: dividing by 1e-6 would amplify that. Sums of equal
        # rewards in another order differ by rounding.
        varies_G = compared.group_std > ROUNDING * np.maximum(1.0, np.abs(compared.group_mean))
        std_N, varies_N = (column[compared.group_of_sample] for column in (compared.group_std, varies_G))
        return np.where(varies_N, compared.deviation / (std_N + STD_EPSILON), 0.0)
