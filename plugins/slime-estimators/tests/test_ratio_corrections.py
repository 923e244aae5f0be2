"""tis and icepop against a float64 loop over tokens: weights through to gradients, metrics, packing, skipped scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from correction_scenes import MASKS, SPLITS, assert_same, expected_gradient, loss_weights, make_scene, train

from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.loss import LossInputs
from slime_training.segments import LocalSegments

CASES = {
    "tis": ("tis", {}, 0.0, 2.0),
    "tis low": ("tis", {"tis_clip": 1.3, "tis_clip_low": 0.8}, 0.8, 1.3),
    "icepop": ("icepop", {}, 0.5, 5.0),
    "icepop narrow": ("icepop", {"tis_clip": 1.5, "tis_clip_low": 0.7}, 0.7, 1.5),
    "icepop one-sided": ("icepop", {"tis_clip": 1.5, "tis_clip_low": 0.0}, 0.0, 1.5),
}


def oracle(scene, name, low, high, old="old"):
    """(ratios, weights), a row per sample."""
    ratios, weights = [], []
    for n, mask in enumerate(MASKS):
        gaps = [getattr(scene, old)[n][t] - scene.rollout[n][t] for t in range(len(mask))]
        ratios.append([math.exp(min(max(gap, -20.0), 20.0)) for gap in gaps])
        if name == "tis":
            weights.append([min(max(ratio, low), high) for ratio in ratios[n]])
        else:
            weights.append([ratio if low <= ratio <= high else 0.0 for ratio in ratios[n]])
    return ratios, weights


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_gradients_and_metrics_follow_the_oracle_for_every_split(correction, case, split):
    name, options, low, high = CASES[case]
    scene = make_scene()
    ratios, weights = oracle(scene, name, low, high)
    got, metrics = train(scene, correction(name), options, splits=SPLITS[split])
    assert_same(got, expected_gradient(weights))

    expected = dict.fromkeys(("tis", "tis_clipfrac", "tis_abs", "ois"), 0.0)
    for n, mask in enumerate(MASKS):
        for t, bit in enumerate(mask):
            share = loss_weights()[n] * bit
            expected["tis"] += share * ratios[n][t]
            expected["tis_clipfrac"] += share * (weights[n][t] != ratios[n][t])
            expected["tis_abs"] += share * abs(ratios[n][t] - 1)
            expected["ois"] += share * math.exp(scene.current[n][t] - scene.old[n][t])
    for metric, value in expected.items():
        assert metrics[metric] == pytest.approx(value, rel=2e-6), metric
    assert 0 < expected["tis_clipfrac"] < 0.8, "all or no tokens are beyond the bounds: the case is trivial"


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_order_and_garbage_at_masked_tokens_do_not_matter(correction, name):
    driver = correction(name)
    plain, metrics = train(make_scene(), driver, {})
    moved, of_moved = train(
        make_scene(garbage=True), driver, {}, order=[5, 3, 0, 4, 2, 1], splits=[[2, 5], [3], [4, 1, 0]]
    )
    assert_same(moved, plain, 1e-12)
    assert of_moved == pytest.approx(metrics, rel=1e-6)
    assert all(np.isfinite(row).all() for row in moved)


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_denominators_keep_the_original_masks(correction, name):
    """Under token_mean too: what icepop leaves out stays in the count."""
    scene = make_scene()
    _, weights = oracle(scene, name, 0.7, 1.5)
    got, _ = train(scene, correction(name), {"tis_clip": 1.5, "tis_clip_low": 0.7}, aggregation=Aggregation.TOKEN_MEAN)
    assert_same(got, expected_gradient(weights, Aggregation.TOKEN_MEAN))


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_old_log_probs_that_were_not_scored_are_the_current_ones_without_their_gradient(correction, name):
    """The ratio is then exp(l - rollout); a gradient through it would show as a factor 1 + ..., not as the weight."""
    scene = make_scene(move=0.0)
    _, weights = oracle(scene, name, 0.7, 1.5, old="current")
    options = {"tis_clip": 1.5, "tis_clip_low": 0.7}
    skipped, metrics = train(scene, correction(name), options, splits=SPLITS["three uneven"], skip_old=True)
    assert_same(skipped, expected_gradient(weights))
    scored, of_scored = train(scene, correction(name), options, splits=SPLITS["three uneven"])
    assert_same(skipped, scored)
    assert metrics == pytest.approx(of_scored, rel=1e-6)
    assert metrics["ois"] == pytest.approx(sum(loss_weights()[n] * sum(MASKS[n]) for n in range(6)))


@pytest.mark.parametrize(("name", "weight"), [("tis", [2.0, 0.25, 1.0]), ("icepop", [0.0, 0.0, 1.0])])
def test_numbers_by_hand(correction, name, weight):
    """Ratios 8, 1/4 and 1."""
    scene = make_scene(gap=0.0, move=0.0)
    scene.rollout[0][:3] = scene.old[0][:3] - np.log([8.0, 0.25, 1.0])
    got, metrics = train(scene, correction(name), {})
    # A = 1.5, 7 tokens of the rollout, 5 rollouts.
    np.testing.assert_allclose(got[0][:3], -1.5 / 35 * np.array(weight), rtol=1e-6)
    assert metrics["tis_clipfrac"] == pytest.approx((1 if name == "tis" else 2) / 35)


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_weights_are_finite_and_detached_whatever_is_at_masked_tokens(correction, name):
    given = {
        "log_probs": torch.tensor([-1.0, math.nan], requires_grad=True),
        "old_log_probs": torch.tensor([-1.0, -math.inf]),
        "rollout_log_probs": torch.tensor([-1.0, math.nan]),
    }
    driver = correction(name)
    segments = LocalSegments(torch.tensor([0, 0]), 1)
    corrected = driver.build(driver.Config()).correct_loss(
        LossInputs(mask=torch.tensor([True, False]), **given), segments
    )
    for values in (corrected.weights, *corrected.metrics.values()):
        assert torch.isfinite(values).all()
        assert not values.requires_grad


def test_a_gap_beyond_twenty_nats_is_one_of_twenty(correction):
    scene = make_scene(gap=0.0, move=0.0)
    scene.rollout[5][0] = scene.old[5][0] - 700.0
    got, metrics = train(scene, correction("tis"), {"tis_clip": 1e30})
    assert got[5][0] == pytest.approx(2.0 / 5 * math.exp(20.0), rel=1e-5)
    assert math.isfinite(metrics["tis"])
