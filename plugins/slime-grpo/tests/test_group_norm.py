"""group_norm against numbers worked by hand and against plain loops over Python lists."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from slime_core.contracts.advantage import CreditInputs
from slime_core.types.batch import Batch, TokenColumns

NAN = math.nan


def make_batch(rewards, credit_key, rollout_id=None, response_length=None, mask=None):
    count = len(rewards)
    response_length = np.full(count, 2) if response_length is None else np.asarray(response_length)
    tokens, response = int(response_length.sum()) + count, int(response_length.sum())
    return Batch(
        index=np.arange(count),
        group_index=np.zeros(count, np.int64),
        rollout_id=np.arange(count) if rollout_id is None else np.asarray(rollout_id, np.int64),
        credit_key=np.asarray(credit_key, np.int64),
        reward=np.asarray(rewards, np.float64),
        truncated=np.zeros(count, bool),
        prompt_length=np.ones(count, np.int32),
        response_length=response_length.astype(np.int32),
        tokens=np.zeros(tokens, np.int32),
        mask=np.ones(response, np.uint8) if mask is None else np.asarray(mask, np.uint8),
        rollout_log_probs=np.zeros(response, np.float32),
        version=np.zeros(response, np.int32),
    )


def credit_of(part, batch, **options):
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(), kl_penalty=None)
    return part("slime.advantages", "group_norm", **options).estimate(inputs)


def oracle(rewards, credit_key, rollout_id, std=True):
    """Loops and the statistics module."""
    credit = [0.0] * len(rewards)
    for key in set(credit_key):
        members = [i for i, k in enumerate(credit_key) if k == key and not math.isnan(rewards[i])]
        rollouts = {rollout_id[i] for i in members}
        values = [statistics.fmean(rewards[i] for i in members if rollout_id[i] == r) for r in rollouts]
        if len(values) < 2:
            continue
        for i in members:
            scale = statistics.stdev(values) + 1e-6 if std else 1.0
            credit[i] = (rewards[i] - statistics.fmean(values)) / scale
    return credit


def test_two_rewards_worked_by_hand(part):
    # mean 1/2, std sqrt(1/2) = 0.70710678: 0.5 / 0.70710778 = 0.70710578.
    credit = credit_of(part, make_batch([0.0, 1.0], [7, 7]))
    np.testing.assert_allclose(credit.sample_credit, [-0.70710578, 0.70710578], atol=1e-8)
    np.testing.assert_allclose(credit.advantages, [-0.70710578] * 2 + [0.70710578] * 2, atol=1e-7)
    assert credit.advantages.dtype == np.float32
    assert credit.returns is None
    assert credit.metrics == {"rollout/singleton_groups": 0.0}


def test_four_rewards_worked_by_hand(part):
    # mean 1, deviations -1 -1 -1 3, variance 12 / 3, std 2.
    credit = credit_of(part, make_batch([0.0, 0.0, 0.0, 4.0], [1, 1, 1, 1]))
    np.testing.assert_allclose(credit.sample_credit, [-0.49999975] * 3 + [1.49999925], atol=1e-8)


def test_without_std_and_without_any_normalization(part):
    batch = make_batch([0.0, 3.0, 5.0, NAN], [1, 1, 2, 2])
    plain = credit_of(part, batch, disable_grpo_std_normalization=True)
    np.testing.assert_array_equal(plain.sample_credit, [-1.5, 1.5, 0.0, 0.0])
    raw = credit_of(part, batch, disable_rewards_normalization=True)
    np.testing.assert_array_equal(raw.sample_credit, [0.0, 3.0, 5.0, 0.0])
    assert raw.metrics == {}


def test_a_rollout_counts_once_with_the_mean_of_its_samples(part):
    # Rollout 0 is three samples with mean 1, rollout 1 one sample of 3: mean 2, not 1.5, std sqrt(2).
    credit = credit_of(part, make_batch([0.0, 1.0, 2.0, 3.0], [5] * 4, rollout_id=[0, 0, 0, 1]))
    scale = math.sqrt(2) + 1e-6
    np.testing.assert_allclose(credit.sample_credit, np.array([-2.0, -1.0, 0.0, 1.0]) / scale, atol=1e-12)


def test_groups_are_credit_keys_not_neighbours(part):
    # One rollout may feed two keys, as when a solver and a critic play one trajectory.
    credit = credit_of(part, make_batch([0.0, 10.0, 1.0, 30.0], [4, 9, 4, 9], rollout_id=[0, 0, 1, 1]))
    np.testing.assert_allclose(credit.sample_credit, [-0.7071058, -0.7071067, 0.7071058, 0.7071067], atol=1e-6)


@pytest.mark.parametrize("std", [True, False])
def test_uneven_groups_follow_the_loop_in_any_order(part, std):
    rng = np.random.default_rng(3)
    count = 60
    credit_key = rng.integers(0, 9, count) * 1_000_003
    rollout_id = rng.integers(0, 25, count) + 10**12
    rewards = rng.normal(size=count).round(2)
    rewards[rng.random(count) < 0.15] = NAN
    rewards[credit_key == credit_key[0]] = NAN
    expected = np.array(oracle(rewards.tolist(), credit_key.tolist(), rollout_id.tolist(), std))
    assert (np.abs(expected) > 0.1).sum() > 20
    lengths = rng.integers(0, 4, count)
    for order in (np.arange(count), rng.permutation(count)):
        batch = make_batch(rewards[order], credit_key[order], rollout_id[order], lengths[order])
        credit = credit_of(part, batch, disable_grpo_std_normalization=not std)
        np.testing.assert_allclose(credit.sample_credit, expected[order], rtol=1e-11, atol=1e-11)
        np.testing.assert_array_equal(credit.advantages, np.repeat(expected[order], lengths[order]).astype(np.float32))


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-3, -1.1, 1 / 3, 0.0])
@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_give_exactly_zero(part, value, std):
    for n in (2, 3, 6, 7):
        # The first rollout is three samples, so that its own mean rounds too.
        batch = make_batch([value] * (n + 2), [1] * (n + 2), rollout_id=[0, 0, 0, *range(1, n)])
        credit = credit_of(part, batch, disable_grpo_std_normalization=not std)
        assert (credit.sample_credit == 0.0).all()
        assert (credit.advantages == 0.0).all()


@pytest.mark.parametrize(
    ("rewards", "rollouts"),
    [
        ([0.0, 2.0, 1.0], [0, 0, 1]),
        # Tied, but not in floats: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1, and half of 0.1 + 0.2 not 0.15.
        ([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], [0, 0, 0, 1, 1, 1]),
        ([0.1, 0.2, 0.15], [0, 0, 1]),
        ([0.0, 0.3, 0.1, 0.2], [0, 0, 1, 1]),
        ([1e6, 3e6 + 0.1, 2e6 + 0.05], [0, 0, 1]),
    ],
)
def test_tied_rollouts_with_differing_samples_do_not_explode(part, rewards, rollouts):
    credit = credit_of(part, make_batch(rewards, [1] * len(rewards), rollout_id=rollouts))
    assert (credit.sample_credit == 0.0).all()


@pytest.mark.parametrize("std", [True, False])
def test_singletons_get_zero_and_are_counted(part, std):
    # Key 1: one rollout of two samples. Key 2: one scored of two. Key 3: none scored. Key 4: a pair.
    batch = make_batch([0.0, 9.0, 5.0, NAN, NAN, 1.0, 2.0], [1, 1, 2, 2, 3, 4, 4], rollout_id=[0, 0, 1, 2, 3, 4, 5])
    credit = credit_of(part, batch, disable_grpo_std_normalization=not std)
    assert (credit.sample_credit[:5] == 0.0).all()
    assert credit.sample_credit[6] == pytest.approx(0.7071058 if std else 0.5, abs=1e-6)
    assert credit.metrics == {"rollout/singleton_groups": 2.0}


def test_shaped_rewards_count_not_those_of_the_batch(part):
    batch = make_batch([1.0, 1.0], [1, 1])
    shaped = np.array([1.0, 0.0])
    inputs = CreditInputs(batch=batch, rewards=shaped, columns=TokenColumns(), kl_penalty=None)
    credit = part("slime.advantages", "group_norm", disable_grpo_std_normalization=True).estimate(inputs)
    np.testing.assert_array_equal(credit.sample_credit, [0.5, -0.5])


def test_samples_without_a_reward_stay_out_and_removed_ones_stay_in(part):
    # The removed sample trains nothing (mask 0) but its reward still moves the mean.
    batch = make_batch([0.0, 1.0, NAN, 2.0], [1] * 4, response_length=[2, 1, 3, 2], mask=[1, 1, 1, 1, 1, 1, 0, 0])
    credit = credit_of(part, batch)
    np.testing.assert_allclose(credit.sample_credit, [-0.999999, 0.0, 0.0, 0.999999], atol=1e-9)


def test_empty_responses_and_an_empty_batch(part):
    credit = credit_of(part, make_batch([0.0, 1.0], [1, 1], response_length=[0, 3]))
    assert credit.advantages.shape == (3,)
    nothing = credit_of(part, make_batch([], []))
    assert nothing.advantages.shape == (0,)
    assert nothing.metrics == {"rollout/singleton_groups": 0.0}


def test_read_only_inputs_are_left_alone(part):
    batch = make_batch([0.0, 1.0, NAN], [1, 1, 1])
    for column in (batch.reward, batch.credit_key, batch.rollout_id):
        column.flags.writeable = False
    first, second = credit_of(part, batch), credit_of(part, batch)
    np.testing.assert_array_equal(first.advantages, second.advantages)
