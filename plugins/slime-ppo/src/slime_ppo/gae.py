"""Gae: generalized advantage estimation over the trained tokens of each response.

Legend: S samples, M response tokens, K trained tokens.
"""

from __future__ import annotations

import numpy as np

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_core.types.batch import Bool, Float64
from slime_estimators.discount import discounted_sums
from slime_estimators.token_rewards import rewards_by_token

ROUNDING = 1e-9
"""Of the largest return: a smaller std of returns is none."""


class Gae(AdvantageEstimator):
    """delta_k = e_k + gamma V_{k+1} - V_k, A_k = delta_k + gamma lambd A_{k+1}, returns A_k + V_k; float64 inside.

    Only trained tokens count. Tool tokens cost no discount and get 0, and V_{k+1} is the value at the next trained token.
    e_k is minus the KL penalty of the token, plus the sample's reward at its last trained token; each part of a process
    reward is at the last trained token of its span. After the last trained token V = 0, also in a response that was cut
    off: its reward includes the effect of the cut.
    Samples without a reward (NaN) get advantage 0, and their old values as returns.

    Source: arXiv:1506.02438, equations 11 and 16.
    """

    def __init__(self, *, gamma: float, lambd: float) -> None:
        self._gamma = gamma
        self._lambd = lambd

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch, column = inputs.batch, inputs.columns.values
        assert column is not None
        scored_M = batch.per_token(~np.isnan(inputs.rewards))
        mask_M = batch.mask.astype(np.bool_)
        trained = np.flatnonzero(mask_M & scored_M)
        sample_K = batch.sample_of_token[trained]
        last_K = np.append(sample_K[1:] != sample_K[:-1], True)[: len(trained)]

        values_K = column[trained].astype(np.float64)
        next_K = np.where(last_K, 0.0, np.roll(values_K, -1))
        rewards_K = rewards_by_token(batch, inputs.rewards)[trained]
        if inputs.kl_penalty is not None:
            rewards_K -= inputs.kl_penalty[trained]
        deltas_M = np.zeros(len(batch.mask), np.float64)
        deltas_M[trained] = rewards_K + self._gamma * next_K - values_K
        advantages_M = discounted_sums(deltas_M, batch.response_length, mask_M & scored_M, self._gamma * self._lambd)

        values_M = np.where(mask_M, column, 0.0).astype(np.float64)
        returns_M = advantages_M + values_M
        return Credit(
            advantages=advantages_M.astype(np.float32),
            returns=returns_M.astype(np.float32),
            sample_credit=inputs.rewards,
            metrics={"rollout/explained_variance": explained_variance(returns_M, values_M, mask_M & scored_M)},
        )


def explained_variance(returns: Float64, values: Float64, chosen: Bool) -> float:
    """1 - Var(return - value) / Var(return) over the chosen tokens: 1 for a perfect critic, 0 for one that predicts only the
    mean, below 0 for a worse one. 0 if the returns do not vary."""
    if not chosen.any():
        return 0.0
    variance, largest = float(np.var(returns[chosen])), float(np.abs(returns[chosen]).max())
    # Equal returns that are summed in another order differ by rounding.
    if variance <= (ROUNDING * max(1.0, largest)) ** 2:
        return 0.0
    return 1.0 - float(np.var((returns - values)[chosen])) / variance
