"""mis against a float64 loop over tokens and samples: every level with every mode, rejection, veto, normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from correction_scenes import (
    LENGTHS,
    MASKS,
    SPLITS,
    assert_same,
    build_batch,
    expected_gradient,
    make_scene,
    train,
)

from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.needs import Need
from slime_core.types.batch import TokenColumns

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "clip", "mask")
BOUNDS = {"token": (0.6, 1.5), "sequence": (0.4, 1.75), "geometric": (0.8, 1.4)}
NUM_TRAINED = sum(sum(mask) for mask in MASKS)


@dataclass
class Expected:
    weights: list = field(default_factory=lambda: [[1.0] * len(mask) for mask in MASKS])
    keep: list = field(default_factory=lambda: [[True] * len(mask) for mask in MASKS])
    counts: dict = field(default_factory=dict)
    """Metric to trained tokens."""

    @property
    def effective(self):
        return [[w * k for w, k in zip(ws, ks, strict=True)] for ws, ks in zip(self.weights, self.keep, strict=True)]


def ratio_of(scene, level, n, t):
    """Of token t of sample n at this level."""
    gaps = {i: scene.old[n][i] - scene.rollout[n][i] for i, bit in enumerate(MASKS[n]) if bit}
    total = sum(gaps.values())
    exponent = {"token": gaps[t], "sequence": total, "geometric": total / max(len(gaps), 1)}[level]
    return math.exp(min(max(exponent, -20.0), 20.0))


def trained_tokens():
    return [(n, t) for n, mask in enumerate(MASKS) for t, bit in enumerate(mask) if bit]


def oracle(scene, *, weigh=None, reject=None, veto=None, normalize=False):
    """`weigh` = (level, mode, low, high), `reject` = (level, low, high)."""
    made = Expected()
    if weigh:
        level, mode, low, high = weigh
        of_unit = {}
        for n, t in trained_tokens():
            ratio = ratio_of(scene, level, n, t)
            if mode == "truncate":
                weight, metric = min(ratio, high), "truncate_fraction" if ratio > high else None
            elif mode == "clip":
                weight = min(max(ratio, low), high)
                metric = "clip_fraction_low" if ratio < low else "clip_fraction_high" if ratio > high else None
            else:
                weight, made.keep[n][t] = ratio, low <= ratio <= high
                metric = "mask_fraction_low" if ratio < low else "mask_fraction_high" if ratio > high else None
            made.weights[n][t] = weight
            if made.keep[n][t]:
                of_unit[(n, t) if level == "token" else n] = weight
            made.counts[metric] = made.counts.get(metric, 0) + 1
        if normalize and of_unit:
            mean = sum(of_unit.values()) / len(of_unit)
            made.weights = [[w / mean for w in row] for row in made.weights]
    if reject:
        level, low, high = reject
        for n, t in trained_tokens():
            ratio = ratio_of(scene, level, n, t)
            made.keep[n][t] &= low <= ratio <= high
            metric = "rs_fraction_low" if ratio < low else "rs_fraction_high" if ratio > high else None
            made.counts[metric] = made.counts.get(metric, 0) + 1
    if veto:
        for n in range(len(MASKS)):
            if any(scene.old[n][t] - scene.rollout[n][t] < math.log(veto) for m, t in trained_tokens() if m == n):
                made.keep[n] = [False] * len(MASKS[n])
    return made


def check(scene, driver, options, expected, split="three uneven", **how):
    got, metrics = train(scene, driver, options, splits=SPLITS[split], **how)
    assert_same(got, expected_gradient(expected.effective, how.get("aggregation", Aggregation.SEQ_MEAN)))
    for metric, count in expected.counts.items():
        if metric is not None:
            assert metrics[f"mis_{metric}"] == pytest.approx(count / NUM_TRAINED), metric
    kept = [expected.weights[n][t] for n, t in trained_tokens() if expected.keep[n][t]]
    assert metrics["mis_weight_mean"] == pytest.approx(sum(kept) / NUM_TRAINED, rel=1e-6)
    assert metrics["mis_weight_min"] == pytest.approx(min(kept), rel=1e-6)
    assert metrics["mis_weight_max"] == pytest.approx(max(kept), rel=1e-6)
    return metrics


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", ["whole", "three uneven", "torn apart, reversed"])
def test_every_level_with_every_mode(correction, level, mode, normalize, split):
    scene = make_scene(gap=0.6)
    low, high = BOUNDS[level]
    options = {
        "tis_level": level, "tis_mode": mode, "tis_lower_bound": low, "tis_upper_bound": high,
        "tis_batch_normalize": normalize,
    }  # fmt: skip
    expected = oracle(scene, weigh=(level, mode, low, high), normalize=normalize)
    check(scene, correction("mis"), options, expected, split)
    beyond = sum(count for metric, count in expected.counts.items() if metric is not None)
    assert 0 < beyond < NUM_TRAINED, "all or no tokens are beyond the bounds: the case is trivial"


@pytest.mark.parametrize("reject_level", LEVELS)
@pytest.mark.parametrize("use_tis", [True, False])
def test_rejection_at_every_level_with_and_without_weights(correction, reject_level, use_tis):
    """Without weights too: it is a switch of its own."""
    scene = make_scene(gap=0.6)
    low, high = BOUNDS[reject_level]
    options = {
        "use_tis": use_tis,
        "use_rs": True,
        "rs_level": reject_level,
        "rs_lower_bound": low,
        "rs_upper_bound": high,
    }
    weigh = ("token", "truncate", 0.5, 2.0) if use_tis else None
    expected = oracle(scene, weigh=weigh, reject=(reject_level, low, high))
    check(scene, correction("mis"), options, expected)
    assert 0 < sum(expected.effective[n][t] > 0 for n, t in trained_tokens()) < NUM_TRAINED


def test_rejection_does_not_restore_tokens_that_the_mode_masks(correction):
    scene = make_scene(gap=0.6)
    options = {
        "tis_mode": "mask", "tis_lower_bound": 0.6, "tis_upper_bound": 1.5,
        "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.8, "rs_upper_bound": 1.4,
    }  # fmt: skip
    expected = oracle(scene, weigh=("token", "mask", 0.6, 1.5), reject=("geometric", 0.8, 1.4))
    masked = oracle(scene, weigh=("token", "mask", 0.6, 1.5)).keep
    rejected = oracle(scene, reject=("geometric", 0.8, 1.4)).keep
    pairs = {(masked[n][t], rejected[n][t]) for n, t in trained_tokens()}
    assert len(pairs) == 4, "every combination must be there"
    check(scene, correction("mis"), options, expected)


def test_rejection_takes_the_bounds_of_the_weights_where_it_has_none(correction):
    scene = make_scene(gap=0.6)
    options = {"tis_mode": "clip", "tis_lower_bound": 0.7, "tis_upper_bound": 1.4, "use_rs": True}
    check(
        scene,
        correction("mis"),
        options,
        oracle(scene, weigh=("token", "clip", 0.7, 1.4), reject=("token", 0.7, 1.4)),
    )


@pytest.mark.parametrize("use_tis", [True, False])
def test_one_token_vetoes_its_sample(correction, use_tis):
    """exp(x) < 1e-4 at one trained token of sample 3; one far below at a tool's token of sample 1 is ignored."""
    scene = make_scene(gap=0.3)
    scene.rollout[3][4] = scene.old[3][4] + 9.3
    scene.rollout[1][1] = scene.old[1][1] + 50.0
    expected = oracle(scene, weigh=("token", "truncate", 0.5, 2.0) if use_tis else None, veto=1e-4)
    assert not any(expected.effective[3])
    assert all(expected.effective[1])
    metrics = check(scene, correction("mis"), {"use_tis": use_tis}, expected)
    # Of the four samples with a trained token.
    assert metrics["mis_veto_fraction"] == 0.25
    # 9.2 nats are not enough; and 0 turns it off.
    scene.rollout[3][4] = scene.old[3][4] + 9.2
    assert train(scene, correction("mis"), {"use_tis": use_tis})[1]["mis_veto_fraction"] == 0
    scene.rollout[3][4] = scene.old[3][4] + 9.3
    got, metrics = train(scene, correction("mis"), {"rs_veto_threshold": 0.0})
    assert "mis_veto_fraction" not in metrics
    assert got[3].any()


@pytest.mark.parametrize("level", LEVELS)
def test_all_of_it_at_once_in_another_order_with_garbage_at_masked_tokens(correction, level):
    scene = make_scene(gap=0.6, seed=11)
    scene.rollout[5][0] = scene.old[5][0] + 12.0
    low, high = BOUNDS[level]
    options = {
        "tis_level": level, "tis_mode": "clip", "tis_lower_bound": low, "tis_upper_bound": high,
        "tis_batch_normalize": True, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.7, "rs_upper_bound": 1.3,
    }  # fmt: skip
    expected = oracle(
        scene, weigh=(level, "clip", low, high), reject=("geometric", 0.7, 1.3), veto=1e-4, normalize=True
    )
    assert any(np.concatenate(expected.effective))
    dirty = make_scene(gap=0.6, seed=11, garbage=True)
    dirty.rollout[5][0] = dirty.old[5][0] + 12.0
    check(scene, correction("mis"), options, expected)
    check(dirty, correction("mis"), options, expected, order=[3, 5, 1, 0, 4, 2])


def test_denominators_keep_the_original_masks(correction):
    scene = make_scene(gap=0.6)
    options = {"tis_mode": "mask", "tis_lower_bound": 0.6, "tis_upper_bound": 1.5}
    expected = oracle(scene, weigh=("token", "mask", 0.6, 1.5))
    check(scene, correction("mis"), options, expected, aggregation=Aggregation.TOKEN_MEAN)


def test_numbers_by_hand(correction):
    """Two samples: ratios 4 and 1/2, of which the sequence ratio is 2 and the geometric mean sqrt 2; and 1."""
    batch = build_batch(np.zeros(sum(r for _, r in LENGTHS))).take(np.array([1, 5]))
    assert batch.mask.tolist() == [1, 0, 1, 1]
    old = np.log([4.0, 1e9, 0.5, 1.0]).astype(np.float32)
    driver = correction("mis")

    def weights(**options):
        part = driver.build(driver.Config(**options))
        corrected = part.correct_batch(batch, TokenColumns(old_log_probs=old))
        assert corrected.weights.dtype == np.float32
        return np.where(corrected.keep, corrected.weights, 0.0)[[0, 2, 3]].tolist()

    root = math.sqrt(2)
    assert weights() == pytest.approx([2.0, 0.5, 1.0])
    assert weights(tis_mode="clip", tis_lower_bound=0.8) == pytest.approx([2.0, 0.8, 1.0])
    assert weights(tis_mode="mask", tis_lower_bound=0.4) == pytest.approx([0.0, 0.5, 1.0])
    assert weights(tis_level="sequence", tis_upper_bound=1.9) == pytest.approx([1.9, 1.9, 1.0])
    assert weights(tis_level="geometric") == pytest.approx([root, root, 1.0])
    # The mean over tokens is 3.5 / 3; over samples, (sqrt 2 + 1) / 2.
    assert weights(tis_batch_normalize=True) == pytest.approx([6 / 3.5, 1.5 / 3.5, 3 / 3.5])
    normal = 2 / (root + 1)
    assert weights(tis_level="geometric", tis_batch_normalize=True) == pytest.approx([root * normal] * 2 + [normal])
    assert weights(use_tis=False, use_rs=True, rs_level="geometric", rs_upper_bound=1.4) == [0.0, 0.0, 1.0]


def test_weights_are_normalized_over_an_optimizer_step_not_over_the_batch(correction):
    scene = make_scene(gap=0.6)
    driver = correction("mis")
    part = driver.build(driver.Config(tis_batch_normalize=True, tis_upper_bound=1e6))
    rules = AdvantageConfig(
        advantage=None,
        corrections=[(part, frozenset(driver.needs))],
        aggregation=Aggregation.SEQ_MEAN,
        rollouts_per_step=3,
        max_response_len=8,
    )
    made = compute_advantages_and_returns(scene.batch, scene.columns, rules)
    # Rollouts 0, 1, 2 (samples 0 to 3) are the first step.
    assert made.step_of_sample.tolist() == [0, 0, 0, 0, 1, 1]
    for step in (0, 1):
        rows = (made.step_of_sample == step)[scene.batch.sample_of_token] & (scene.batch.mask > 0)
        assert made.columns.correction[rows].mean() == pytest.approx(1.0, abs=1e-6)
        assert made.step_metrics[step]["mis_weight_mean"] == pytest.approx(1.0)
    assert made.columns.correction[: sum(r for _, r in LENGTHS[:4])][scene.flat_mask[:14]].std() > 0.1


def test_nothing_to_train_is_nothing_to_correct(correction):
    """A step of an empty and a fully masked sample: finite, and no metric of an empty mean."""
    scene = make_scene()
    batch = scene.batch.take(np.array([2, 4]))
    columns = scene.columns.take(scene.batch.response_rows(np.array([2, 4])))
    driver = correction("mis")
    for level in LEVELS:
        part = driver.build(driver.Config(tis_level=level, tis_batch_normalize=True, use_rs=True, rs_level=level))
        rules = AdvantageConfig(
            advantage=None, corrections=[(part, frozenset(driver.needs))], rollouts_per_step=2, max_response_len=8
        )
        made = compute_advantages_and_returns(batch, columns, rules)
        assert made.columns.correction.tolist() == [0, 0, 0, 0]
        assert all(value == 0 for value in made.step_metrics[0].values())


def test_it_corrects_the_batch_and_declares_its_columns(correction):
    driver = correction("mis")
    assert not driver.in_loss
    assert driver.needs == {Need.OLD_LOGPROBS, Need.ROLLOUT_LOGPROBS}


def test_it_composes_with_another_correction_by_product(correction):
    """icepop in the loss after mis on the driver: weights multiply, and either can leave a token out."""
    scene = make_scene(gap=0.6)
    driver = correction("mis")
    part = driver.build(driver.Config(tis_level="geometric", tis_mode="mask", tis_lower_bound=0.8, tis_upper_bound=1.3))
    rules = AdvantageConfig(
        advantage=None,
        corrections=[(part, frozenset(driver.needs))] * 2,
        rollouts_per_step=5,
        max_response_len=8,
    )
    once = oracle(scene, weigh=("geometric", "mask", 0.8, 1.3)).effective
    made = compute_advantages_and_returns(scene.batch, scene.columns, rules).columns.correction
    np.testing.assert_allclose(made, np.concatenate(once) ** 2 * scene.flat_mask, rtol=1e-5)
