"""Rewards of samples at the tokens where they were earned."""

from __future__ import annotations

import numpy as np

from slime_core.types.batch import Batch, Float64


def rewards_by_token(batch: Batch, rewards: Float64) -> Float64:
    """(S,) to (M,): each sample's reward where it was earned. Process rewards are at their tokens, and the rest is at the
    last trained token. 0 for samples without a reward (NaN) and for samples without a trained token."""
    earned = np.zeros(len(batch.mask), np.float64)
    rest = rewards
    scored = ~np.isnan(rewards)
    if batch.token_reward is not None:
        earned += np.where(batch.per_token(scored), batch.token_reward, 0.0)
        rest = rewards - batch.sample_sums(batch.token_reward)
    trained = np.flatnonzero(batch.mask)
    ending = scored & (batch.num_trainable > 0)
    last = np.cumsum(batch.num_trainable) - 1
    earned[trained[last[ending]]] += rest[ending]
    return earned
