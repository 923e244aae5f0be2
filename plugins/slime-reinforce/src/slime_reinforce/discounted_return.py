"""DiscountedReturn: the advantage of a token is its discounted return.

Legend: S samples, M response tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_estimators.discount import discounted_sums
from slime_estimators.token_rewards import rewards_by_token


class DiscountedReturn(AdvantageEstimator):
    """G_t = e_t + gamma G_(t+1) with e_t = -kl_penalty_t, plus the sample's reward at its last trainable token; each part
    of a process reward is at the last trainable token of its span.

    t counts only trainable tokens: a masked token (a tool's output) gets 0, has no reward and costs no discount. Fully
    masked samples, and samples without a reward (NaN), get 0.

    Source: arXiv:2501.03262, REINFORCE++; its batch normalization is the kernel's `normalize_advantages`.
    """

    def __init__(self, *, gamma: float = 1.0) -> None:
        self._gamma = gamma

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        scored_S = ~np.isnan(inputs.rewards)
        credited_M = batch.mask.astype(np.bool_) & batch.per_token(scored_S)
        token_reward_M = rewards_by_token(batch, inputs.rewards)
        if inputs.kl_penalty is not None:
            token_reward_M -= inputs.kl_penalty
        returns_M = discounted_sums(token_reward_M, batch.response_length, credited_M, self._gamma)
        return Credit(advantages=returns_M.astype(np.float32), sample_credit=np.where(scored_S, inputs.rewards, 0.0))
