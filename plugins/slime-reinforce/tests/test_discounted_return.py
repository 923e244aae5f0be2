"""discounted_return against numbers worked by hand, and against the sum that defines a return, in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slime_core.contracts.advantage import CreditInputs
from slime_core.types.batch import TokenColumns

NAN = math.nan


def returns_of(part, batch, kl=None, **options):
    kl_penalty = None if kl is None else np.asarray(kl, np.float32)
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(), kl_penalty=kl_penalty)
    return part("slime.advantages", "discounted_return", **options).estimate(inputs)


def oracle(rewards, masks, kl, gamma):
    """G of the k-th trainable token: the sum over the later ones j of gamma^(j - k) times what each is given."""
    result, start = [], 0
    for reward, mask in zip(rewards, masks, strict=True):
        tokens = [t for t, bit in enumerate(mask) if bit]
        given = [0.0 if math.isnan(reward) else -float(kl[start + t]) for t in tokens]
        if tokens and not math.isnan(reward):
            given[-1] += reward
        returns = [0.0] * len(mask)
        for k, t in enumerate(tokens):
            returns[t] = math.fsum(gamma ** (j - k) * given[j] for j in range(k, len(tokens)))
        result += returns
        start += len(mask)
    return np.array(result)


def test_a_reward_is_discounted_from_the_last_token_back(part, make_batch):
    batch = make_batch([8.0, 1.0], [[1, 1, 1, 1], [1]])
    credit = returns_of(part, batch, gamma=0.5)
    assert credit.advantages.tolist() == [1.0, 2.0, 4.0, 8.0, 1.0]
    assert credit.advantages.dtype == np.float32
    assert credit.returns is None
    assert credit.sample_credit.tolist() == [8.0, 1.0]
    # By default every token is credited with the whole reward.
    assert returns_of(part, batch).advantages.tolist() == [8.0] * 4 + [1.0]


def test_tool_tokens_neither_receive_nor_discount(part, make_batch):
    # The last token of the first sample is a tool's: its reward is at the fourth, two trainable tokens from the first.
    batch = make_batch([8.0, 4.0], [[1, 0, 1, 1, 0], [0, 0, 1]])
    assert returns_of(part, batch, gamma=0.5).advantages.tolist() == [2.0, 0.0, 4.0, 8.0, 0.0, 0.0, 0.0, 4.0]


def test_the_kl_penalty_is_a_reward_of_its_own_token(part, make_batch):
    # e = -1, -2, 8 - 4 around a gap: 4, then -2 + 2, then -1 + 0.
    batch = make_batch([8.0], [[1, 0, 1, 1]])
    kl = [1.0, 0.0, 2.0, 4.0]
    assert returns_of(part, batch, kl, gamma=0.5).advantages.tolist() == [-1.0, 0.0, 0.0, 4.0]
    assert returns_of(part, batch, kl).advantages.tolist() == [1.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_uneven_samples_follow_the_definition(part, make_batch, gamma, seed):
    rng = np.random.default_rng(seed)
    lengths = [5, 0, 40, 3, 1, 17, 17, 2]
    masks = [(rng.random(length) < 0.7).astype(int).tolist() for length in lengths]
    masks[3] = [0, 0, 0]
    masks[5][-2:] = [1, 0]
    rewards = rng.normal(size=len(lengths)).tolist()
    rewards[6] = NAN
    batch = make_batch(rewards, masks)
    kl = (0.1 * rng.normal(size=sum(lengths)) * batch.mask).astype(np.float32)
    expected = oracle(rewards, masks, kl, gamma)
    assert (np.abs(expected) > 1e-3).sum() > 20
    credit = returns_of(part, batch, kl, gamma=gamma)
    np.testing.assert_allclose(credit.advantages, expected.astype(np.float32), rtol=1e-6, atol=1e-7)
    without = returns_of(part, batch, gamma=gamma)
    expected = oracle(rewards, masks, np.zeros(len(kl)), gamma)
    np.testing.assert_allclose(without.advantages, expected.astype(np.float32), rtol=1e-6, atol=1e-7)


def test_a_long_response_keeps_its_digits(part, make_batch):
    """gamma^20000 underflows: sums divided by powers of gamma would be 0 / 0 here."""
    length, gamma = 20_000, 0.9
    batch = make_batch([1.0], [[1] * length])
    kl = np.full(length, -0.25, np.float32)
    credit = returns_of(part, batch, kl, gamma=gamma)
    # A geometric series of 0.25 and, near the end, the reward.
    left = np.arange(length)[::-1]
    expected = 0.25 * (1 - gamma ** (left + 1.0)) / (1 - gamma) + gamma**left
    np.testing.assert_allclose(credit.advantages, expected, rtol=1e-6)


def test_nothing_to_train_raises_nothing(part, make_batch):
    # A fully masked sample, an empty response, a sample without a reward; no sample at all.
    batch = make_batch([1.0, 2.0, NAN], [[0, 0], [], [1, 1]])
    credit = returns_of(part, batch, [0.0, 0.0, 3.0, 4.0], gamma=0.5)
    assert credit.advantages.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert credit.sample_credit.tolist() == [1.0, 2.0, 0.0]
    assert returns_of(part, make_batch([], [])).advantages.shape == (0,)


def test_every_sample_of_a_rollout_has_its_own_reward(part, make_batch):
    """Nothing is compared: neither group nor rollout matters."""
    batch = make_batch([1.0, 2.0, 4.0], [[1, 1], [1], [1, 1]], credit_key=[0, 0, 0], rollout_id=[7, 7, 8])
    assert returns_of(part, batch, gamma=0.5).advantages.tolist() == [0.5, 1.0, 2.0, 2.0, 4.0]


def test_shaped_rewards_count_and_inputs_are_left_alone(part, make_batch):
    batch = make_batch([5.0, NAN], [[1, 1], [1]])
    kl = np.array([1.0, 0.0, 0.0], np.float32)
    shaped = np.array([2.0, NAN])
    for column in (shaped, kl, batch.mask, batch.reward):
        column.flags.writeable = False
    inputs = CreditInputs(batch=batch, rewards=shaped, columns=TokenColumns(), kl_penalty=kl)
    estimator = part("slime.advantages", "discounted_return")
    assert estimator.estimate(inputs).advantages.tolist() == [1.0, 2.0, 0.0]
    assert estimator.estimate(inputs).advantages.tolist() == [1.0, 2.0, 0.0]
