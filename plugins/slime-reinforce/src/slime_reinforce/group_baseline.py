"""GroupBaseline: rewards minus the mean of the prompt's rollouts, and the KL penalty of each token.

Legend: S samples, M response tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_estimators.comparison import RewardGroups


class GroupBaseline(AdvantageEstimator):
    """A_t = c_i - kl_penalty_t, c_i = r_i - mean over the rollouts of the group, each counted once (`RewardGroups`).

    A group of one rollout gets c = 0. Masked tokens, and samples without a reward (NaN), get A = 0.

    Source: arXiv:2501.03262, REINFORCE++ with baseline; its batch normalization is the kernel's `normalize_advantages`.
    """

    def __init__(self, *, subtract_mean: bool = True) -> None:
        self._subtract_mean = subtract_mean

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        metrics: dict[str, float] = {}
        scored_S = ~np.isnan(inputs.rewards)
        if self._subtract_mean:
            compared = RewardGroups.of(batch, inputs.rewards)
            credit_S = compared.credit(compared.deviation)
            metrics["rollout/singleton_groups"] = float(compared.num_singletons)
        else:
            credit_S = np.where(scored_S, inputs.rewards, 0.0)
        advantages_M = batch.per_token(credit_S)
        if inputs.kl_penalty is not None:
            advantages_M = advantages_M - inputs.kl_penalty
        credited_M = batch.mask.astype(np.bool_) & batch.per_token(scored_S)
        advantages_M = np.where(credited_M, advantages_M, 0.0).astype(np.float32)
        return Credit(advantages=advantages_M, sample_credit=credit_S, metrics=metrics)
