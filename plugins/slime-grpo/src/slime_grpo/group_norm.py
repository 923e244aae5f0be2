"""GroupNorm: rewards relative to the other rollouts of the same prompt.

Legend: S samples, R rollouts (a rollout may be several samples), G groups, M response tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.contracts.advantage import AdvantageEstimator, Credit, CreditInputs
from slime_core.types.batch import Float64, Int64

STD_EPSILON = 1e-6


class GroupNorm(AdvantageEstimator):
    """c_i = (r_i - mean) / (std + 1e-6), the same at every token of the sample.

    Mean and std (n - 1) go over the rollouts of the group, each counted once with the mean of its samples, so that a
    trajectory cut into many samples does not outvote the others. A group of one rollout, and rollouts that all did
    equally well, get exactly 0. Samples without a reward (NaN) get 0 and stay out of the statistics.

    Source: arXiv:2402.03300, section 4.1.2; without the std: arXiv:2503.20783, section 3.
    """

    def __init__(self, *, subtract_mean: bool = True, divide_by_std: bool = True) -> None:
        self._subtract_mean = subtract_mean
        self._divide_by_std = divide_by_std

    def estimate(self, inputs: CreditInputs) -> Credit:
        batch = inputs.batch
        credit_S = np.zeros(batch.num_samples, dtype=np.float64)
        scored = np.flatnonzero(~np.isnan(inputs.rewards))
        metrics: dict[str, float] = {}
        if self._subtract_mean:
            credit_S[scored], num_singletons = self._relative(
                inputs.rewards[scored], batch.credit_key[scored], batch.rollout_id[scored]
            )
            metrics["rollout/singleton_groups"] = float(num_singletons)
        else:
            credit_S[scored] = inputs.rewards[scored]
        advantages_M = credit_S.astype(np.float32)[batch.sample_of_token]
        return Credit(advantages=advantages_M, sample_credit=credit_S, metrics=metrics)

    def _relative(self, rewards_S: Float64, credit_key_S: Int64, rollout_id_S: Int64) -> tuple[Float64, int]:
        """Credit of scored samples, and how many groups are a single rollout."""
        group_S, num_groups = numbered(credit_key_S)
        trajectory_S, num_trajectories = numbered(rollout_id_S)
        # A trajectory whose samples have several credit keys is one rollout in each of those groups.
        pairs_R, rollout_S = np.unique(group_S * num_trajectories + trajectory_S, return_inverse=True)
        group_R = pairs_R // max(num_trajectories, 1)

        value_R = segment_means(rewards_S, rollout_S, len(pairs_R))
        mean_G = segment_means(value_R, group_R, num_groups)
        num_rollouts_G = np.bincount(group_R, minlength=num_groups)
        single_G = num_rollouts_G == 1

        credit_S = np.where(single_G[group_S], 0.0, rewards_S - mean_G[group_S])
        if self._divide_by_std:
            squares_G = np.bincount(group_R, weights=(value_R - mean_G[group_R]) ** 2, minlength=num_groups)
            std_G = np.sqrt(squares_G / np.maximum(num_rollouts_G - 1, 1))
            # With std 0 the rollouts tie: samples inside one may still differ, and dividing by 1e-6 would blow that up.
            credit_S = np.where(std_G[group_S] > 0, credit_S / (std_G[group_S] + STD_EPSILON), 0.0)
        return credit_S, int(single_G.sum())


def numbered(keys: npt.NDArray[np.integer[Any]]) -> tuple[Int64, int]:
    """Each key as a number in [0, n), and n."""
    distinct, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64), len(distinct)


def segment_means(values: Float64, segment: Int64, num_segments: int) -> Float64:
    """Mean of each segment's values, none of them empty; of equal values, exactly that value."""
    lowest = np.full(num_segments, np.inf)
    highest = np.full(num_segments, -np.inf)
    np.minimum.at(lowest, segment, values)
    np.maximum.at(highest, segment, values)
    sums = np.bincount(segment, weights=values, minlength=num_segments)
    # Three times 0.1 sums to more than 0.3: without the clip equal rewards would get a tiny advantage.
    return np.clip(sums / np.bincount(segment, minlength=num_segments), lowest, highest)
