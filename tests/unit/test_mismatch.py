"""The gap between the trainer's and the engine's log-probs, against loops over tokens, and numbers by hand."""

import math

import numpy as np
import pytest

from slime_core.algorithm.mismatch import mismatch_metrics

LENGTHS = [(1, 4), (2, 3), (1, 0), (3, 5), (2, 2)]
MASKS = [[1, 1, 1, 1], [1, 0, 1], [], [0, 1, 1, 1, 0], [0, 0]]


def oracle(batch, trainer):
    starts = np.cumsum([0, *(r for _, r in LENGTHS)])
    engine = batch.rollout_log_probs.astype(float)
    rows = [[starts[n] + t for t, bit in enumerate(mask) if bit] for n, mask in enumerate(MASKS)]
    rows = [of_sample for of_sample in rows if of_sample]
    tokens = [t for of_sample in rows for t in of_sample]
    gap = [float(trainer[t]) - engine[t] for t in tokens]

    def over_samples(value):
        return sum(value(of_sample) for of_sample in rows) / len(rows)

    def over_tokens(value):
        return sum(value(x) for x in gap) / len(gap)

    def log_ppl(log_probs, of_sample):
        return -sum(float(log_probs[t]) for t in of_sample) / len(of_sample)

    def diff(of_sample):
        return log_ppl(trainer, of_sample) - log_ppl(engine, of_sample)

    return {
        "train_rollout_logprob_abs_diff": over_tokens(abs),
        "mis_kl": over_tokens(lambda x: -x),
        "mis_k3_kl": over_tokens(lambda x: math.exp(x) - 1 - x),
        "mis_ratio_max": math.exp(max(gap)),
        "mis_ratio_min": math.exp(min(gap)),
        "mis_chi2_token": over_tokens(lambda x: math.exp(2 * x) - 1),
        "mis_chi2_seq": over_samples(lambda ts: math.exp(2 * sum(float(trainer[t]) - engine[t] for t in ts)) - 1),
        "mis_training_log_ppl": over_samples(lambda ts: log_ppl(trainer, ts)),
        "mis_rollout_log_ppl": over_samples(lambda ts: log_ppl(engine, ts)),
        "mis_training_ppl": over_samples(lambda ts: math.exp(log_ppl(trainer, ts))),
        "mis_rollout_ppl": over_samples(lambda ts: math.exp(log_ppl(engine, ts))),
        "mis_log_ppl_diff": over_samples(diff),
        "mis_log_ppl_abs_diff": over_samples(lambda ts: abs(diff(ts))),
        "mis_ppl_ratio": over_samples(lambda ts: math.exp(diff(ts))),
    }


@pytest.fixture
def batch(make_batch):
    return make_batch(LENGTHS, masks=MASKS, seed=4)


def scored(batch, gap):
    noise = gap * np.random.default_rng(2).normal(size=len(batch.mask))
    return (batch.rollout_log_probs + noise).astype(np.float32)


@pytest.mark.parametrize("gap", [1e-4, 0.5])
def test_every_metric_follows_its_definition(batch, gap):
    trainer = scored(batch, gap)
    metrics, expected = mismatch_metrics(batch, trainer), oracle(batch, trainer)
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        # k3 of a tiny gap cancels in the plain definition; the code's expm1 does not.
        assert metrics[name] == pytest.approx(value, rel=1e-6 if name == "mis_k3_kl" else 1e-12), name


def test_order_and_what_is_at_masked_tokens_do_not_matter(batch):
    trainer = scored(batch, 0.5)
    expected = mismatch_metrics(batch, trainer)
    masked = batch.mask == 0
    trainer[masked] = np.nan
    batch.rollout_log_probs[masked] = -np.inf
    order = np.array([3, 0, 4, 2, 1])
    moved = mismatch_metrics(batch.take(order), trainer[batch.response_rows(order)])
    assert moved == pytest.approx(expected, rel=1e-12)


def test_by_hand(make_batch):
    """One sample of two tokens, the trainer's probabilities 1/2 and 1/8, the engine's 1/4 and 1/4."""
    batch = make_batch([(1, 2)])
    batch.rollout_log_probs[:] = np.log([0.25, 0.25])
    metrics = mismatch_metrics(batch, np.log([0.5, 0.125]).astype(np.float32))
    assert metrics["mis_training_ppl"] == pytest.approx(4)
    assert metrics["mis_rollout_ppl"] == pytest.approx(4)
    assert metrics["mis_ppl_ratio"] == pytest.approx(1)
    assert (metrics["mis_ratio_max"], metrics["mis_ratio_min"]) == (pytest.approx(2), pytest.approx(0.5))
    assert metrics["mis_kl"] == pytest.approx(0, abs=1e-7)
    assert metrics["mis_k3_kl"] == pytest.approx((2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2)
    # The ratio squared is 4 and 1/4; that of the sequence 1.
    assert metrics["mis_chi2_token"] == pytest.approx((4 + 0.25) / 2 - 1)
    assert metrics["mis_chi2_seq"] == pytest.approx(0, abs=1e-6)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(math.log(2))


def test_extrema_are_of_trained_tokens_alone(make_batch):
    batch = make_batch([(1, 3), (1, 1)], masks=[[1, 0, 1], [0]])
    for gap, low, high in (([-1, 0, -2, 5], -2, -1), ([1, 0, 2, -5], 1, 2)):
        metrics = mismatch_metrics(batch, batch.rollout_log_probs + np.array(gap, np.float32))
        assert metrics["mis_ratio_min"] == pytest.approx(math.exp(low), rel=1e-6)
        assert metrics["mis_ratio_max"] == pytest.approx(math.exp(high), rel=1e-6)


def test_equal_log_probs_have_no_mismatch(batch):
    metrics = mismatch_metrics(batch, batch.rollout_log_probs)
    for name in ("mis_kl", "mis_k3_kl", "mis_chi2_token", "mis_chi2_seq", "mis_log_ppl_diff"):
        assert metrics[name] == 0
    assert metrics["mis_ratio_max"] == metrics["mis_ratio_min"] == metrics["mis_ppl_ratio"] == 1


def test_huge_gaps_stay_finite_and_no_trained_token_gives_no_metrics(batch, make_batch):
    metrics = mismatch_metrics(batch, batch.rollout_log_probs + np.float32(900))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["mis_ratio_max"] == pytest.approx(math.exp(20))
    assert mismatch_metrics(make_batch([(1, 2), (1, 0)], masks=[[0, 0], []]), np.zeros(2, np.float32)) == {}
