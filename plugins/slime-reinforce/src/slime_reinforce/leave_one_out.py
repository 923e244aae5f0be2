"""LeaveOneOut: rewards relative to the mean of the other rollouts of the same prompt.

Legend: S samples, N scored samples, M response tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_core.types.batch import Float64
from slime_estimators.comparison import RewardGroups


class LeaveOneOut(AdvantageEstimator):
    """c_i = r_i - mean of the group's other rollouts, the same at every token of the sample.

    Each rollout counts once (`RewardGroups`): all samples of a rollout are left out together. A group of one rollout gets
    0. Samples without a reward (NaN) get 0 and are left out of the means. With one sample per rollout this is
    n / (n - 1) times r_i - mean.

    Source: arXiv:2402.14740, its estimator RLOO.
    """

    def __init__(self, *, subtract_mean: bool = True) -> None:
        self._subtract_mean = subtract_mean

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        metrics: dict[str, float] = {}
        if self._subtract_mean:
            compared = RewardGroups.of(batch, inputs.rewards)
            credit_S = compared.credit(left_out(compared))
            metrics["rollout/singleton_groups"] = float(compared.num_singletons)
        else:
            credit_S = np.where(np.isnan(inputs.rewards), 0.0, inputs.rewards)
        advantages_M = batch.per_token(credit_S.astype(np.float32))
        return Credit(advantages=advantages_M, sample_credit=credit_S, metrics=metrics)


def left_out(compared: RewardGroups) -> Float64:
    """(N,) r_i - (n mean - v) / (n - 1), where v is the mean of the sample's rollout. Computed from deviations from the
    mean, which are exactly 0 for equal rewards."""
    num_others_N = np.maximum(compared.num_rollouts[compared.group_of_sample] - 1, 1)
    return compared.deviation + compared.rollout_deviation[compared.rollout_of_sample] / num_others_N
