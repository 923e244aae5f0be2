"""Rank within the group."""

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs


class Rank(AdvantageEstimator):
    def __init__(self, scale):
        self.scale = scale

    def estimate(self, inputs: CreditInputs) -> Credit:
        rewards, batch = np.nan_to_num(inputs.rewards), inputs.batch
        credit = np.zeros(len(rewards))
        for key in np.unique(batch.credit_key):
            of_group = batch.credit_key == key
            group = rewards[of_group]
            if len(group) > 1:
                below = (group[:, None] > group[None, :]).sum(1)
                above = (group[:, None] < group[None, :]).sum(1)
                credit[of_group] = self.scale * (below - above) / (len(group) - 1)
        return Credit(advantages=credit[batch.sample_of_token].astype(np.float32), sample_credit=credit)
