"""group_baseline and leave_one_out against numbers worked by hand and against plain loops over Python lists."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from slime_core.contracts.advantage import CreditInputs
from slime_core.types.batch import TokenColumns

NAN = math.nan
BASELINES = ("group_baseline", "leave_one_out")


def credit_of(part, name, batch, kl=None, **options):
    kl_penalty = None if kl is None else np.asarray(kl, np.float32)
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(), kl_penalty=kl_penalty)
    return part("slime.advantages", name, **options).estimate(inputs)


def singles(make_batch, rewards, **keys):
    """One token each."""
    return make_batch(rewards, [[1]] * len(rewards), **keys)


def oracle(name, rewards, credit_key, rollout_id):
    """Loops and the statistics module: the means over the rollouts that a sample is compared with."""
    credit = [0.0] * len(rewards)
    for i, reward in enumerate(rewards):
        members = [j for j, key in enumerate(credit_key) if key == credit_key[i] and not math.isnan(rewards[j])]
        values = {
            rollout: statistics.fmean(rewards[j] for j in members if rollout_id[j] == rollout)
            for rollout in {rollout_id[j] for j in members}
        }
        if math.isnan(reward) or len(values) < 2:
            continue
        if name == "leave_one_out":
            del values[rollout_id[i]]
        credit[i] = reward - statistics.fmean(values.values())
    return credit


def test_worked_by_hand(part, make_batch):
    # Mean 1, deviations -1 -1 -1 3. Leaving one out: means 4/3 4/3 4/3 0, which is 4/3 of the deviations.
    batch = make_batch([0.0, 0.0, 0.0, 4.0], [[1, 1], [1], [], [1]])
    credit = credit_of(part, "group_baseline", batch)
    assert credit.sample_credit.tolist() == [-1.0, -1.0, -1.0, 3.0]
    assert credit.advantages.tolist() == [-1.0, -1.0, -1.0, 3.0]
    credit = credit_of(part, "leave_one_out", batch)
    np.testing.assert_allclose(credit.sample_credit, [-4 / 3, -4 / 3, -4 / 3, 4.0], rtol=1e-15)
    np.testing.assert_allclose(credit.advantages, [-4 / 3, -4 / 3, -4 / 3, 4.0], rtol=1e-7)
    assert credit.advantages.dtype == np.float32
    assert credit.returns is None
    assert credit.metrics == {"rollout/singleton_groups": 0.0}


def test_the_kl_penalty_comes_off_each_token_of_group_baseline(part, make_batch):
    batch = make_batch([0.0, 2.0, 7.0, NAN], [[1, 1], [1, 0, 1], [0], [1]], credit_key=[1, 1, 2, 1])
    credit = credit_of(part, "group_baseline", batch, [0.5, -0.25, 0.0, 0.0, 4.0, 0.0, 8.0])
    # Nothing is discounted. A tool's token, a masked sample and one without a reward get nothing.
    assert credit.advantages.tolist() == [-1.5, -0.75, 1.0, 0.0, -3.0, 0.0, 0.0]
    assert credit.sample_credit.tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_a_rollout_in_several_samples_counts_once_and_is_left_out_whole(part, make_batch):
    # Rollout 0 is three samples with mean 1, rollout 1 one sample of 3, rollout 2 one of 8.
    batch = singles(make_batch, [0.0, 1.0, 2.0, 3.0, 8.0], rollout_id=[0, 0, 0, 1, 2])
    assert credit_of(part, "group_baseline", batch).sample_credit.tolist() == [-4.0, -3.0, -2.0, -1.0, 4.0]
    # Against 5.5, the mean of the other two rollouts; against 4.5; against 2.
    assert credit_of(part, "leave_one_out", batch).sample_credit.tolist() == [-5.5, -4.5, -3.5, -1.5, 6.0]


def test_without_a_baseline(part, make_batch):
    batch = singles(make_batch, [0.0, 3.0, 5.0, NAN], credit_key=[1, 1, 2, 2])
    for name in BASELINES:
        raw = credit_of(part, name, batch, disable_rewards_normalization=True)
        assert raw.sample_credit.tolist() == [0.0, 3.0, 5.0, 0.0]
        assert raw.advantages.tolist() == [0.0, 3.0, 5.0, 0.0]
        assert raw.metrics == {}


@pytest.mark.parametrize("name", BASELINES)
def test_uneven_groups_follow_the_loop_in_any_order(part, make_batch, name):
    rng = np.random.default_rng(3)
    count = 60
    credit_key = rng.integers(0, 9, count) * 1_000_003
    rollout_id = rng.integers(0, 25, count) + 10**12
    rewards = rng.normal(size=count).round(2)
    rewards[rng.random(count) < 0.15] = NAN
    rewards[credit_key == credit_key[0]] = NAN
    masks = [[1] * length for length in rng.integers(0, 4, count)]
    expected = np.array(oracle(name, rewards.tolist(), credit_key.tolist(), rollout_id.tolist()))
    assert (np.abs(expected) > 0.1).sum() > 20
    for order in (np.arange(count), rng.permutation(count)):
        ordered = [masks[i] for i in order]
        batch = make_batch(rewards[order], ordered, credit_key[order], rollout_id[order])
        credit = credit_of(part, name, batch)
        np.testing.assert_allclose(credit.sample_credit, expected[order], rtol=1e-11, atol=1e-11)
        per_token = np.repeat(expected[order], batch.response_length)
        np.testing.assert_allclose(credit.advantages, per_token, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("value", [0.1, 0.7, 1e-3, -1.1, 1 / 3, 0.0])
def test_equal_rewards_give_exactly_zero(part, make_batch, name, value):
    for n in (2, 3, 6, 7):
        # The first rollout is three samples, so that its own mean rounds too.
        batch = singles(make_batch, [value] * (n + 2), rollout_id=[0, 0, 0, *range(1, n)])
        credit = credit_of(part, name, batch)
        assert (credit.sample_credit == 0.0).all()
        assert (credit.advantages == 0.0).all()


@pytest.mark.parametrize("name", BASELINES)
def test_singletons_get_zero_and_are_counted(part, make_batch, name):
    # Key 1: one rollout of two samples. Key 2: one scored of two. Key 3: none scored. Key 4: a pair.
    rewards = [0.0, 9.0, 5.0, NAN, NAN, 1.0, 2.0]
    batch = singles(make_batch, rewards, credit_key=[1, 1, 2, 2, 3, 4, 4], rollout_id=[0, 0, 1, 2, 3, 4, 5])
    credit = credit_of(part, name, batch)
    assert (credit.sample_credit[:5] == 0.0).all()
    assert credit.sample_credit[6] == {"group_baseline": 0.5, "leave_one_out": 1.0}[name]
    assert credit.metrics == {"rollout/singleton_groups": 2.0}


@pytest.mark.parametrize("name", BASELINES)
def test_empty_responses_masked_samples_and_an_empty_batch(part, make_batch, name):
    # The masked sample trains nothing, but its reward still moves the mean.
    credit = credit_of(part, name, make_batch([0.0, 1.0, 5.0], [[], [1, 1, 1], [0, 0]]))
    baseline = {"group_baseline": 2.0, "leave_one_out": 2.5}[name]
    assert credit.advantages.shape == (5,)
    assert credit.advantages[:3].tolist() == [1.0 - baseline] * 3
    nothing = credit_of(part, name, make_batch([], []))
    assert nothing.advantages.shape == (0,)
    assert nothing.metrics == {"rollout/singleton_groups": 0.0}


@pytest.mark.parametrize("name", BASELINES)
def test_shaped_rewards_count_and_inputs_are_left_alone(part, make_batch, name):
    batch = singles(make_batch, [1.0, 1.0, NAN])
    shaped = np.array([1.0, 0.0, NAN])
    for column in (shaped, batch.reward, batch.credit_key, batch.rollout_id, batch.mask):
        column.flags.writeable = False
    inputs = CreditInputs(batch=batch, rewards=shaped, columns=TokenColumns(), kl_penalty=None)
    size = {"group_baseline": 0.5, "leave_one_out": 1.0}[name]
    for _ in range(2):
        credit = part("slime.advantages", name).estimate(inputs)
        assert credit.sample_credit.tolist() == [size, -size, 0.0]
