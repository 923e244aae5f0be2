"""Credit over the whole batch: shaping, the reward-side KL, whitening, corrections. Numbers by hand."""

import math

import numpy as np
import pytest
import torch

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns, require_finite, whiten
from slime_core.contracts.advantage import AdvantageEstimator, Credit, RewardShaper
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.correction import BatchCorrection, OffPolicyCorrection
from slime_core.contracts.kl import KlEstimator
from slime_core.contracts.needs import Need
from slime_core.errors import PluginError, TrainingError
from slime_core.types.batch import TokenColumns


class RewardToTokens(AdvantageEstimator):
    """Every token gets its sample's reward; the KL penalty is taken off where there is one."""

    def __init__(self, garbage=0.0, returns=None):
        self.garbage = garbage
        self.returns = returns
        self.seen = None

    def estimate(self, inputs):
        self.seen = inputs
        tokens = np.nan_to_num(inputs.rewards)[inputs.batch.sample_of_token].astype(np.float32)
        if inputs.kl_penalty is not None:
            tokens = tokens - inputs.kl_penalty
        tokens = np.where(inputs.batch.mask.astype(bool), tokens, np.float32(self.garbage))
        return Credit(advantages=tokens, returns=self.returns, sample_credit=inputs.rewards, metrics={"rollout/x": 3.0})


def rules(advantage, **changes):
    given = {"rollouts_per_step": 8, "max_response_len": 10, "aggregation": Aggregation.SEQ_MEAN, **changes}
    return AdvantageConfig(advantage=advantage, **given)


LENGTHS = [(1, 2), (2, 3), (1, 0), (1, 1)]
MASKS = [[1, 1], [1, 0, 1], [], [0]]


@pytest.fixture
def batch(make_batch):
    return make_batch(LENGTHS, masks=MASKS, reward=[1.0, 4.0, 9.0, 5.0])


def test_whitening_by_hand():
    # 1, 1, 4, 4 trained: mean 2.5, sum of squares 9, variance 9 / 3.
    values, mask = np.array([1, 1, 4, 99, 4], np.float32), np.array([1, 1, 1, 0, 1], bool)
    unit = 1.5 / math.sqrt(3 + 1e-8)
    assert whiten(values, mask).tolist() == pytest.approx([-unit, -unit, unit, 0, unit], rel=1e-6)
    assert whiten(values, mask)[0] == pytest.approx(-0.8660254)


def test_whitening_does_not_cancel():
    """E[x^2] - E[x]^2 in float32 would be 0 here, or negative."""
    values = np.float32(4096) + np.array([0, 0.5, 1.0, 0.5], np.float32)
    assert whiten(values, np.ones(4, bool)).tolist() == pytest.approx([-1.2247449, 0, 1.2247449, 0], abs=1e-6)


@pytest.mark.parametrize(("mask", "expected"), [([0, 0], [0, 0]), ([1, 0], [0, 0])])
def test_whitening_of_none_or_one_token_is_zero(mask, expected):
    assert whiten(np.array([5, 7], np.float32), np.array(mask, bool)).tolist() == expected


def test_advantages_are_whitened_and_returns_are_not(batch):
    made = compute_advantages_and_returns(
        batch, TokenColumns(), rules(RewardToTokens(garbage=77.0), normalize_advantages=True)
    )
    unit = 1.5 / math.sqrt(3)
    assert made.columns.advantages.tolist() == pytest.approx([-unit, -unit, unit, 0, unit, 0], rel=1e-5)
    assert made.columns.returns.tolist() == [1, 1, 4, 0, 4, 0]
    assert made.metrics["rollout/advantages"] == pytest.approx(0, abs=1e-7)
    assert made.metrics["rollout/returns"] == pytest.approx(2.5)
    assert made.metrics["rollout/x"] == 3


def test_an_estimators_own_returns_are_kept(batch):
    own = np.arange(6, dtype=np.float32)
    made = compute_advantages_and_returns(batch, TokenColumns(), rules(RewardToTokens(returns=own)))
    assert made.columns.returns.tolist() == [0, 1, 2, 0, 4, 0]
    assert made.columns.advantages.dtype == made.columns.returns.dtype == np.float32


def test_masked_tokens_may_hold_anything(batch):
    for garbage in (math.nan, math.inf, -math.inf):
        made = compute_advantages_and_returns(
            batch, TokenColumns(), rules(RewardToTokens(garbage), normalize_advantages=True)
        )
        assert np.isfinite(made.columns.advantages).all()


def test_samples_without_a_reward_are_left_out_of_the_mean(make_batch):
    batch = make_batch(LENGTHS, reward=[1.0, math.nan, 4.0, math.nan])
    made = compute_advantages_and_returns(batch, TokenColumns(), rules(RewardToTokens()))
    assert made.metrics["rollout/rewards"] == 2.5


class Plus(RewardShaper):
    def __init__(self, number, factor=1.0):
        self.number, self.factor = number, factor

    def shape(self, rewards, batch, max_response_len):
        assert max_response_len == 10
        return self.factor * rewards + self.number


def test_shapers_run_in_order_before_the_advantage(batch):
    part = RewardToTokens()
    compute_advantages_and_returns(batch, TokenColumns(), rules(part, shaping=[Plus(1.0), Plus(0.0, 10.0)]))
    assert part.seen.rewards.tolist() == [20, 50, 100, 60]
    assert batch.reward.tolist() == [1, 4, 9, 5]


class SquaredGap(KlEstimator):
    def __call__(self, log_probs, ref_log_probs, ratio=None):
        assert ratio is None
        assert bool(torch.isfinite(log_probs).all())
        return (log_probs - ref_log_probs) ** 2


def test_the_reward_side_kl_by_hand(batch):
    old = np.array([-1, -2, -3, np.nan, -4, np.inf], np.float32)
    ref = np.array([-1, -1, -1, -np.inf, -2, np.nan], np.float32)
    part = RewardToTokens()
    made = compute_advantages_and_returns(
        batch, TokenColumns(old_log_probs=old, ref_log_probs=ref), rules(part, kl_reward=SquaredGap(), kl_coef=0.5)
    )
    assert part.seen.kl_penalty.tolist() == [0, 0.5, 2, 0, 2, 0]
    assert made.columns.advantages.tolist() == [1, 0.5, 2, 0, 2, 0]
    # What the estimator did not ask for stays away from it.
    assert part.seen.columns.old_log_probs is None


def test_the_reward_side_kl_asks_for_its_columns(batch):
    with pytest.raises(ValueError, match="ref_log_probs"):
        compute_advantages_and_returns(
            batch, TokenColumns(), rules(RewardToTokens(), kl_reward=SquaredGap(), kl_coef=0.5)
        )


def test_declared_needs_are_given(batch):
    part = RewardToTokens()
    columns = TokenColumns(values=np.ones(6, np.float32), ref_log_probs=np.ones(6, np.float32))
    compute_advantages_and_returns(batch, columns, rules(part, advantage_needs=frozenset({Need.VALUES})))
    assert part.seen.columns.values is not None
    assert part.seen.columns.ref_log_probs is None
    assert part.seen.kl_penalty is None


def test_a_loss_without_advantages_needs_no_reward(make_batch):
    batch = make_batch(LENGTHS, reward=[math.nan] * 4)
    made = compute_advantages_and_returns(batch, TokenColumns(), rules(None))
    assert made.columns.advantages is None
    assert made.columns.loss_weight.shape == (6,)


def test_numbers_that_are_not_finite_name_the_sample(make_batch):
    batch = make_batch(LENGTHS, masks=MASKS, group=[40, 41, 42, 43])
    column = np.array([0, 0, 0, np.nan, np.nan, np.nan], np.float32)
    with pytest.raises(TrainingError, match=r"old_log_probs of sample 1 \(group 41\) are not finite: 1 tokens"):
        require_finite("old_log_probs", column, batch)
    require_finite("old_log_probs", np.array([0, 0, 0, np.nan, 0, np.inf], np.float32), batch)


@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_an_estimator_that_returns_nan_is_caught(batch, name):
    class Broken(RewardToTokens):
        def estimate(self, inputs):
            values = {"advantages": np.zeros(6, np.float32), "returns": np.zeros(6, np.float32)}
            values[name][4] = np.nan
            return Credit(**values)

    with pytest.raises(TrainingError, match=f"{name} of sample 1"):
        compute_advantages_and_returns(batch, TokenColumns(), rules(Broken()))


class Weighs(OffPolicyCorrection):
    def __init__(self, weights, keep=None, metric="tis"):
        self.weights = np.array(weights, np.float32)
        self.keep = np.ones(len(weights), bool) if keep is None else np.array(keep, bool)
        self.metric = metric

    def correct_batch(self, batch, columns):
        return BatchCorrection(
            weights=self.weights, keep=self.keep, metrics={self.metric: self.weights}, step_metrics={"largest": 7.0}
        )


NONE = frozenset()


def test_corrections_multiply_and_keep_the_denominators(batch):
    first = Weighs([2, 0.5, 3, np.nan, 1, np.inf], keep=[1, 1, 1, 1, 0, 1])
    second = Weighs([10, 10, 0.1, 0, 10, 0], metric="icepop")
    plain = compute_advantages_and_returns(batch, TokenColumns(), rules(RewardToTokens()))
    made = compute_advantages_and_returns(
        batch, TokenColumns(), rules(RewardToTokens(), corrections=[(first, NONE), (second, NONE)])
    )
    # NaN and inf are at masked tokens.
    assert made.columns.correction.tolist() == pytest.approx([20, 5, 0.3, 0, 0, 0])
    assert made.columns.loss_weight.tolist() == plain.columns.loss_weight.tolist()
    # Averaged over the original masks, the rejected token with them.
    assert made.step_metrics == ({"tis": pytest.approx(6.5 / 4), "icepop": pytest.approx(30.1 / 4), "largest": 7.0},)
    assert plain.columns.correction is None


def test_a_correction_that_is_not_finite_where_it_counts_is_caught(batch):
    broken = Weighs([1, 1, np.nan, 1, 1, 1])
    with pytest.raises(TrainingError, match="correction weights of sample 1"):
        compute_advantages_and_returns(batch, TokenColumns(), rules(RewardToTokens(), corrections=[(broken, NONE)]))


class Looks(OffPolicyCorrection):
    """Records the columns that it gets."""

    def __init__(self):
        self.columns, self.rollout = set(), None

    def correct_batch(self, batch, columns):
        self.columns, self.rollout = set(columns.present()), batch.rollout_log_probs
        return BatchCorrection(weights=np.ones(6, np.float32), keep=np.ones(6, bool))


@pytest.mark.parametrize(
    "needs", [NONE, frozenset({Need.OLD_LOGPROBS}), frozenset({Need.REF_LOGPROBS, Need.ROLLOUT_LOGPROBS})]
)
def test_a_correction_gets_what_it_declared_and_the_credit(batch, needs):
    every = {need.value: np.zeros(6, np.float32) for need in Need if need is not Need.ROLLOUT_LOGPROBS}
    before, looks = batch.rollout_log_probs.copy(), Looks()
    # The second time there is a correction already, which is not its business either.
    compute_advantages_and_returns(
        batch, TokenColumns(**every), rules(RewardToTokens(), corrections=[(Looks(), needs), (looks, needs)])
    )
    given = {need.value for need in needs - {Need.ROLLOUT_LOGPROBS}}
    assert looks.columns == given | {"advantages", "returns"}
    assert np.isnan(looks.rollout).all() == (Need.ROLLOUT_LOGPROBS not in needs)
    np.testing.assert_array_equal(batch.rollout_log_probs, before)


def test_a_correction_that_reads_what_it_did_not_declare_fails(batch):
    class Sneaky(OffPolicyCorrection):
        def correct_batch(self, batch, columns):
            gap = columns.old_log_probs - batch.rollout_log_probs
            return BatchCorrection(weights=np.exp(gap), keep=np.ones(6, bool))

    columns = TokenColumns(old_log_probs=np.zeros(6, np.float32))
    raised = r"Sneaky, correct_batch: raised TypeError: .* \(test_credit.py:\d+ in correct_batch"
    with pytest.raises(PluginError, match=raised):
        compute_advantages_and_returns(
            batch, columns, rules(None, corrections=[(Sneaky(), frozenset({Need.ROLLOUT_LOGPROBS}))])
        )
    with pytest.raises(TrainingError, match="correction weights of sample 0"):
        compute_advantages_and_returns(
            batch, columns, rules(None, corrections=[(Sneaky(), frozenset({Need.OLD_LOGPROBS}))])
        )


class OverItsMean(OffPolicyCorrection):
    """Weights divided by their mean: of the optimizer step, that is, not of the batch."""

    def correct_batch(self, batch, columns):
        weights = -batch.rollout_log_probs
        return BatchCorrection(
            weights=weights / weights.mean(), keep=np.ones(len(weights), bool), metrics={"mean": weights}
        )


def test_a_correction_sees_one_optimizer_step_at_a_time(make_batch):
    batch = make_batch([(1, 2), (1, 2), (1, 2)])
    batch.rollout_log_probs[:] = [-1, -3, -10, -30, -5, -5]
    # Rollout 0 is step 0, rollouts 1 and 2 are step 1 with two of them, and the last one is short.
    corrections = [(OverItsMean(), frozenset({Need.ROLLOUT_LOGPROBS}))]
    made = compute_advantages_and_returns(
        batch, TokenColumns(), rules(None, corrections=corrections, rollouts_per_step=2)
    )
    assert made.step_of_sample.tolist() == [0, 0, 1]
    mean = (1 + 3 + 10 + 30) / 4
    assert made.columns.correction.tolist() == pytest.approx([1 / mean, 3 / mean, 10 / mean, 30 / mean, 1, 1])
    assert [metrics["mean"] for metrics in made.step_metrics] == [pytest.approx(mean), pytest.approx(5)]
