"""The teacher's advantage, alone and beside a task reward, against plain Python floats."""

from __future__ import annotations

import math
import statistics
from importlib.metadata import entry_points

import numpy as np
import pytest

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.contracts.advantage import CreditInputs
from slime_core.errors import PluginError
from slime_core.types.batch import TokenColumns

# Uneven lengths, a tool's token, an empty response, a fully masked sample.
MASKS = [[1, 1, 1], [1, 0, 1, 1, 0], [], [0, 0], [1]]
FLAT = [bit for mask in MASKS for bit in mask]
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.75]
SAMPLE_OF_TOKEN = [sample for sample, mask in enumerate(MASKS) for _ in mask]
NEEDS = entry_points(group="slime.advantages")["reverse_kl"].load().needs


@pytest.fixture
def columns():
    """NaN and infinity at masked tokens: what is there may not matter."""
    rng = np.random.default_rng(3)
    old, teacher = (rng.normal(-1.5, 0.7, len(FLAT)).astype(np.float32) for _ in range(2))
    masked = np.array(FLAT) == 0
    old[masked], teacher[masked] = np.nan, -np.inf
    return TokenColumns(old_log_probs=old, teacher_log_probs=teacher)


def gaps(columns):
    """old - teacher of every trained token, 0 at the others, in float64."""
    pairs = zip(columns.old_log_probs.tolist(), columns.teacher_log_probs.tolist(), FLAT, strict=True)
    return [old - teacher if bit else 0.0 for old, teacher, bit in pairs]


@pytest.mark.parametrize("coefficient", [1.0, 0.3])
def test_the_teacher_alone(part, make_batch, columns, coefficient):
    batch = make_batch(MASKS)
    estimator = part("slime.advantages", "reverse_kl", opd_kl_coef=coefficient)
    credit = estimator.estimate(CreditInputs(batch=batch, rewards=batch.reward, columns=columns, kl_penalty=None))
    gap = gaps(columns)
    np.testing.assert_allclose(credit.advantages, [-coefficient * g for g in gap], rtol=1e-6, atol=1e-7)
    trained = [g for g, bit in zip(gap, FLAT, strict=True) if bit]
    assert credit.metrics == {"rollout/opd_reverse_kl": pytest.approx(statistics.fmean(trained), rel=1e-6)}


def test_nothing_to_train(part, make_batch):
    batch = make_batch([[0, 0], []])
    nothing = np.zeros(2, np.float32)
    columns = TokenColumns(old_log_probs=nothing, teacher_log_probs=nothing)
    credit = part("slime.advantages", "reverse_kl").estimate(
        CreditInputs(batch=batch, rewards=batch.reward, columns=columns, kl_penalty=None)
    )
    assert credit.advantages.tolist() == [0, 0]
    assert credit.metrics == {"rollout/opd_reverse_kl": 0.0}


@pytest.mark.parametrize("whiten", [False, True])
def test_beside_a_task_reward(part, make_batch, columns, whiten):
    """A = r - mean of the group - 0.5 (old - teacher), whitened after that; the returns are the reward's alone."""
    keys = [0, 0, 0, 1, 1]
    rules = AdvantageConfig(
        advantage=part("slime.advantages", "group_norm", disable_grpo_std_normalization=True),
        advantage_terms=[(part("slime.advantages", "reverse_kl", opd_kl_coef=0.5), NEEDS)],
        normalize_advantages=whiten,
        rollouts_per_step=5,
        max_response_len=8,
    )
    made = compute_advantages_and_returns(make_batch(MASKS, REWARDS, keys), columns, rules)
    means = {key: statistics.fmean(r for r, k in zip(REWARDS, keys, strict=True) if k == key) for key in keys}
    task = [
        REWARDS[sample] - means[keys[sample]] if bit else 0.0 for sample, bit in zip(SAMPLE_OF_TOKEN, FLAT, strict=True)
    ]
    expected = [t - 0.5 * gap for t, gap in zip(task, gaps(columns), strict=True)]
    trained = [a for a, bit in zip(expected, FLAT, strict=True) if bit]
    if whiten:
        mean, std = statistics.fmean(trained), math.sqrt(statistics.variance(trained) + 1e-8)
        expected = [(a - mean) / std if bit else 0.0 for a, bit in zip(expected, FLAT, strict=True)]
    np.testing.assert_allclose(made.columns.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.columns.returns, task, rtol=1e-6, atol=1e-7)
    assert "rollout/opd_reverse_kl" in made.metrics


def test_a_term_sees_no_more_than_it_declares(part, make_batch, columns):
    rules = AdvantageConfig(
        advantage=part("slime.advantages", "group_norm"),
        advantage_terms=[(part("slime.advantages", "reverse_kl"), frozenset())],
        rollouts_per_step=5,
        max_response_len=8,
    )
    with pytest.raises(PluginError, match="teacher_log_probs"):
        compute_advantages_and_returns(make_batch(MASKS, REWARDS), columns, rules)
