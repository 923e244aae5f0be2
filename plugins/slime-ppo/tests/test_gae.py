"""Advantages and returns against the recursion written as a loop over each sample's tokens, and numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slime_core.contracts.advantage import CreditInputs
from slime_core.types.batch import Batch, TokenColumns


def batch_of(lengths, masks, rewards):
    count, total = len(lengths), sum(lengths)
    return Batch(
        index=np.arange(count),
        group_index=np.arange(count),
        rollout_id=np.arange(count),
        credit_key=np.arange(count),
        reward=np.array(rewards, np.float64),
        truncated=np.zeros(count, np.bool_),
        prompt_length=np.full(count, 2, np.int32),
        response_length=np.array(lengths, np.int32),
        tokens=np.zeros(total + 2 * count, np.int32),
        mask=np.array([bit for mask in masks for bit in mask], np.uint8),
        rollout_log_probs=np.zeros(total, np.float32),
        version=np.zeros(total, np.int32),
    )


class Case:
    """Uneven lengths; an empty response; one fully masked; tool tokens at the start, in the middle and at the end."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths = [6, 0, 4, 1, 9, 5, 1]
        self.masks = [(rng.random(length) < 0.6).astype(int).tolist() for length in self.lengths]
        self.masks[0] = [0, 1, 1, 0, 1, 0]
        self.masks[2] = [0, 0, 0, 0]
        self.masks[3], self.masks[6] = [1], [0]
        self.rewards = rng.normal(size=len(self.lengths)).tolist()
        self.values = rng.normal(size=sum(self.lengths)).astype(np.float32)
        self.kl = rng.normal(scale=0.1, size=sum(self.lengths)).astype(np.float32)
        self.trained = np.array([bit for mask in self.masks for bit in mask], bool)

    def estimate(self, gae, *, kl=False, values=None):
        batch = batch_of(self.lengths, self.masks, self.rewards)
        return gae.estimate(
            CreditInputs(
                batch=batch,
                rewards=batch.reward,
                columns=TokenColumns(values=self.values if values is None else values),
                kl_penalty=np.where(self.trained, self.kl, 0).astype(np.float32) if kl else None,
            )
        )

    def oracle(self, gamma, lambd, *, kl=False):
        """Token by token, from the last trained one of each sample."""
        advantages, returns = np.zeros(len(self.values)), np.zeros(len(self.values))
        end = 0
        for length, mask, reward in zip(self.lengths, self.masks, self.rewards, strict=True):
            start, end = end, end + length
            next_value = next_advantage = 0.0
            pending = reward
            for token in reversed(range(start, end)):
                if not mask[token - start]:
                    continue
                earned = pending - (float(self.kl[token]) if kl else 0.0)
                pending = 0.0
                value = float(self.values[token])
                delta = earned + gamma * next_value - value
                next_advantage = delta + gamma * lambd * next_advantage
                next_value = value
                advantages[token], returns[token] = next_advantage, next_advantage + value
        return advantages, returns


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize(("gamma", "lambd"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0), (0.0, 1.0)])
def test_equals_the_recursion_in_a_loop(part, gamma, lambd, kl):
    for seed in range(5):
        case = Case(seed)
        credit = case.estimate(part("slime.advantages", "gae", gamma=gamma, lambd=lambd), kl=kl)
        advantages, returns = case.oracle(gamma, lambd, kl=kl)
        assert np.abs(advantages).max() > 0.3
        np.testing.assert_allclose(credit.advantages[case.trained], advantages[case.trained], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(credit.returns[case.trained], returns[case.trained], rtol=1e-6, atol=1e-6)
        assert not credit.advantages[~case.trained].any()
        assert not credit.returns[~case.trained].any()
        assert credit.advantages.dtype == credit.returns.dtype == np.float32
        assert credit.sample_credit.tolist() == case.rewards


def test_numbers_worked_by_hand(part):
    """Two trained tokens around one of a tool: V = 0.5, 0.25, r = 1, gamma 0.5, lambda 0.5.

    delta_2 = 1 - 0.25 = 0.75; delta_1 = 0.5 x 0.25 - 0.5 = -0.375; A_1 = -0.375 + 0.25 x 0.75 = -0.1875.
    """
    batch = batch_of([3], [[1, 0, 1]], [1.0])
    values = np.array([0.5, 7.0, 0.25], np.float32)
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(values=values), kl_penalty=None)
    credit = part("slime.advantages", "gae", gamma=0.5, lambd=0.5).estimate(inputs)
    assert credit.advantages.tolist() == [-0.1875, 0.0, 0.75]
    assert credit.returns.tolist() == [0.3125, 0.0, 1.0]


def test_without_discount_it_is_the_reward_minus_the_value(part):
    """gamma = lambda = 1: what the response earned from here on, minus what was expected."""
    case = Case()
    credit = case.estimate(part("slime.advantages", "gae"))
    earned = np.repeat(case.rewards, case.lengths)
    np.testing.assert_allclose(
        credit.advantages[case.trained], (earned - case.values)[case.trained], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(credit.returns[case.trained], earned[case.trained], rtol=1e-6, atol=1e-6)


def test_masked_values_reach_nothing(part):
    case, gae = Case(), part("slime.advantages", "gae", gamma=0.9, lambd=0.9)
    clean = case.estimate(gae, kl=True)
    dirty = case.estimate(gae, kl=True, values=np.where(case.trained, case.values, np.nan).astype(np.float32))
    np.testing.assert_array_equal(clean.advantages, dirty.advantages)
    np.testing.assert_array_equal(clean.returns, dirty.returns)
    assert clean.metrics == dirty.metrics


def test_a_sample_without_a_reward_teaches_nothing_and_disturbs_no_other(part):
    case, gae = Case(), part("slime.advantages", "gae", lambd=0.9)
    before = case.estimate(gae)
    case.rewards[4] = float("nan")
    after = case.estimate(gae)
    unscored = np.repeat(np.arange(len(case.lengths)) == 4, case.lengths)
    assert (unscored & case.trained).any()
    np.testing.assert_array_equal(after.advantages[~unscored], before.advantages[~unscored])
    assert not after.advantages[unscored].any()
    np.testing.assert_array_equal(after.returns[unscored & case.trained], case.values[unscored & case.trained])


@pytest.mark.parametrize(("lengths", "masks"), [([], []), ([0, 0], [[], []]), ([2, 1], [[0, 0], [0]])])
def test_nothing_trained_is_legal(part, lengths, masks):
    batch = batch_of(lengths, masks, [1.0] * len(lengths))
    values = np.full(sum(lengths), np.nan, np.float32)
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(values=values), kl_penalty=None)
    credit = part("slime.advantages", "gae").estimate(inputs)
    assert credit.advantages.tolist() == credit.returns.tolist() == [0.0] * sum(lengths)
    assert credit.metrics == {"rollout/explained_variance": 0.0}


def test_a_long_response_is_fast_and_exact(part):
    """16 thousand tokens beside short ones, against the same recursion."""
    case = Case()
    case.lengths, case.masks, case.rewards = [16384, 3, 700], [[1] * 16384, [1] * 3, [1] * 700], [1.0, 0.0, -1.0]
    case.values = np.random.default_rng(1).normal(size=sum(case.lengths)).astype(np.float32)
    case.trained = np.ones(sum(case.lengths), bool)
    credit = case.estimate(part("slime.advantages", "gae", gamma=0.999, lambd=0.99))
    np.testing.assert_allclose(credit.advantages, case.oracle(0.999, 0.99)[0], rtol=1e-5, atol=1e-5)


def test_explained_variance(part):
    """Returns are the rewards 0 and 1, one token each: a critic that predicts them, one that predicts the mean, one that is
    wrong the other way round (1 - 1/0.25 x var of (-1, 1))."""
    batch = batch_of([1, 1], [[1], [1]], [0.0, 1.0])

    def explained(*values):
        columns = TokenColumns(values=np.array(values, np.float32))
        inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=columns, kl_penalty=None)
        return part("slime.advantages", "gae").estimate(inputs).metrics["rollout/explained_variance"]

    assert explained(0.0, 1.0) == 1.0
    assert explained(0.5, 0.5) == 0.0
    assert explained(1.0, 0.0) == -3.0


def test_returns_that_vary_by_rounding_explain_nothing(part):
    values = np.random.default_rng(0).normal(size=400).astype(np.float32)
    batch = batch_of([50] * 8, [[1] * 50] * 8, [0.1] * 8)
    inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(values=values), kl_penalty=None)
    credit = part("slime.advantages", "gae", gamma=1.0, lambd=1.0).estimate(inputs)
    assert credit.metrics["rollout/explained_variance"] == 0.0
