"""Comparison: groups by key, rollouts counted once, and statistics that are exact where rewards are equal."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from slime_estimators.comparison import RewardGroups

NAN = math.nan


def compare(make_batch, rewards, group, rollout_id=None):
    batch = make_batch([(1, 1)] * len(rewards), group=group, rollout_id=rollout_id, reward=rewards)
    return RewardGroups.of(batch, batch.reward)


def test_worked_by_hand(make_batch):
    # Group 4: a rollout of two samples with mean 1, one of 5, one without a reward. Group 2: on its own.
    compared = compare(make_batch, [0.0, 2.0, 5.0, NAN, 7.0], [4, 4, 4, 4, 2], [10, 10, 11, 12, 13])
    assert compared.scored.tolist() == [0, 1, 2, 4]
    assert compared.group_of_sample.tolist() == [1, 1, 1, 0]
    assert compared.num_rollouts.tolist() == [1, 2]
    assert compared.group_mean.tolist() == [7.0, 3.0]
    np.testing.assert_allclose(compared.group_std, [0.0, math.sqrt(8)], rtol=1e-15)
    assert compared.deviation.tolist() == [-3.0, -1.0, 2.0, 0.0]
    assert compared.rollout_deviation[compared.rollout_of_sample].tolist() == [-2.0, -2.0, 2.0, 0.0]
    assert compared.num_singletons == 1
    assert compared.credit(compared.deviation).tolist() == [-3.0, -1.0, 2.0, 0.0, 0.0]


def test_a_trajectory_with_two_keys_is_a_rollout_in_each_group(make_batch):
    compared = compare(make_batch, [0.0, 10.0, 1.0, 30.0], [4, 9, 4, 9], [0, 0, 1, 1])
    assert compared.num_rollouts.tolist() == [2, 2]
    assert compared.deviation.tolist() == [-0.5, -10.0, 0.5, 10.0]


def test_samples_of_a_rollout_on_its_own_have_nothing_to_be_compared_with(make_batch):
    compared = compare(make_batch, [0.0, 9.0], [1, 1], [3, 3])
    assert compared.deviation.tolist() == [0.0, 0.0]
    assert compared.rollout_deviation.tolist() == [0.0]


def test_random_groups_against_the_statistics_module(make_batch):
    rng = np.random.default_rng(0)
    rewards, group = rng.normal(size=50), rng.integers(0, 7, 50) * 10**12
    compared = compare(make_batch, rewards, group)
    for number, key in enumerate(sorted(set(group.tolist()))):
        members = rewards[group == key].tolist()
        assert compared.group_mean[number] == pytest.approx(statistics.fmean(members), rel=1e-12)
        assert compared.group_std[number] == pytest.approx(statistics.stdev(members), rel=1e-12)


@pytest.mark.parametrize("value", [0.1, 1 / 3, -1.1, 1e300])
def test_equal_rewards_are_exact(make_batch, value):
    compared = compare(make_batch, [value] * 9, [1] * 9, [0, 0, 0, 1, 2, 3, 4, 5, 6])
    assert compared.group_mean.tolist() == [value]
    assert not compared.deviation.any()
    assert not compared.group_std.any()


@pytest.mark.parametrize("rewards", [[], [NAN, NAN]])
def test_nothing_to_compare(make_batch, rewards):
    compared = compare(make_batch, rewards, [1] * len(rewards))
    assert compared.num_singletons == 0
    assert compared.credit(compared.deviation).tolist() == [0.0] * len(rewards)
