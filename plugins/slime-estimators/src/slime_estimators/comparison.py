"""RewardGroups: the groups of samples whose rewards are compared, and the statistics of each group.

Legend: S samples, N scored samples (those with a reward), R rollouts (a rollout may be several samples), G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_core.types.batch import Batch, Float64, Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardGroups:
    """Samples with the same credit key form a group; samples without a reward (NaN) are left out.

    Inside a group every rollout counts once, with the mean of its samples, so that a trajectory cut into many samples
    has no larger weight. A trajectory whose samples have several credit keys is one rollout in each of those groups.
    Statistics of equal rewards are exact: deviations and standard deviations are 0, not 1e-17.
    """

    num_samples: int
    """S"""
    scored: Int64
    """(N,) indices of the scored samples."""
    rewards: Float64
    """(N,)"""
    group_of_sample: Int64
    """(N,) in [0, G)."""
    rollout_of_sample: Int64
    """(N,) in [0, R)."""
    group_of_rollout: Int64
    """(R,) in [0, G)."""
    num_rollouts: Int64
    """(G,), none of them 0."""

    @classmethod
    def of(cls, batch: Batch, rewards: Float64) -> RewardGroups:
        """Groups the samples of a batch. `rewards`: (S,) after shaping; NaN: no reward."""
        scored = np.flatnonzero(~np.isnan(rewards))
        group_of_sample, num_groups = numbered(batch.credit_key[scored])
        trajectory_of_sample, num_trajectories = numbered(batch.rollout_id[scored])
        pairs, rollout_of_sample = np.unique(
            group_of_sample * num_trajectories + trajectory_of_sample, return_inverse=True
        )
        group_of_rollout = pairs // max(num_trajectories, 1)
        return cls(
            num_samples=batch.num_samples,
            scored=scored,
            rewards=rewards[scored],
            group_of_sample=group_of_sample,
            rollout_of_sample=rollout_of_sample.astype(np.int64, copy=False),
            group_of_rollout=group_of_rollout,
            num_rollouts=np.bincount(group_of_rollout, minlength=num_groups),
        )

    @cached_property
    def group_mean(self) -> Float64:
        """(G,) over rollouts."""
        return segment_means(self._rollout_reward, self.group_of_rollout, len(self.num_rollouts))

    @cached_property
    def group_std(self) -> Float64:
        """(G,) over rollouts, with n - 1; 0 in a group of one."""
        squares = np.bincount(
            self.group_of_rollout, weights=self.rollout_deviation**2, minlength=len(self.num_rollouts)
        )
        return np.sqrt(squares / np.maximum(self.num_rollouts - 1, 1))

    @cached_property
    def rollout_deviation(self) -> Float64:
        """(R,) a rollout's mean reward minus its group's."""
        return self._rollout_reward - self.group_mean[self.group_of_rollout]

    @cached_property
    def deviation(self) -> Float64:
        """(N,) a sample's reward minus its group's mean; 0 in a group of one
        rollout."""
        alone = (self.num_rollouts == 1)[self.group_of_sample]
        return np.where(alone, 0.0, self.rewards - self.group_mean[self.group_of_sample])

    @property
    def num_singletons(self) -> int:
        """Number of groups with one rollout."""
        return int((self.num_rollouts == 1).sum())

    def credit(self, values: Float64) -> Float64:
        """(N,) to (S,): 0 for samples without a reward."""
        credit = np.zeros(self.num_samples, dtype=np.float64)
        credit[self.scored] = values
        return credit

    @cached_property
    def _rollout_reward(self) -> Float64:
        return segment_means(self.rewards, self.rollout_of_sample, len(self.group_of_rollout))


def numbered(keys: npt.NDArray[np.integer[Any]]) -> tuple[Int64, int]:
    """Maps each key to a number in [0, n). Returns the numbers, and n."""
    distinct, numbers = np.unique(keys, return_inverse=True)
    return numbers.astype(np.int64, copy=False), len(distinct)


def segment_means(values: Float64, segment: Int64, num_segments: int) -> Float64:
    """Mean of the values of each segment, none of which is empty. The mean of equal values is exactly that value."""
    lowest = np.full(num_segments, np.inf)
    highest = np.full(num_segments, -np.inf)
    np.minimum.at(lowest, segment, values)
    np.maximum.at(highest, segment, values)
    sums = np.bincount(segment, weights=values, minlength=num_segments)
    # Three times 0.1 sums to more than 0.3: without the clip equal rewards would get a tiny advantage.
    return np.clip(sums / np.bincount(segment, minlength=num_segments), lowest, highest)
