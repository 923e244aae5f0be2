"""opsm against a float64 loop over samples."""

from __future__ import annotations

import numpy as np
import pytest
from correction_scenes import ADVANTAGE, MASKS, SPLITS, assert_same, expected_gradient, loss_weights, make_scene, train


def oracle(scene, delta):
    """Weights, a row per sample."""
    weights = []
    for n, mask in enumerate(MASKS):
        gaps = [scene.old[n][t] - scene.current[n][t] for t, bit in enumerate(mask) if bit]
        moved_away = sum(gaps) / max(len(gaps), 1) > delta
        weights.append([0.0 if moved_away and ADVANTAGE[n] < 0 else 1.0] * len(mask))
    return weights


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("delta", [1e-4, 0.3, 0.6])
def test_gradients_and_metric_follow_the_oracle_for_every_split(correction, split, delta):
    scene = make_scene(seed=10)
    weights = oracle(scene, delta)
    got, metrics = train(scene, correction("opsm"), {"opsm_delta": delta}, splits=SPLITS[split])
    assert_same(got, expected_gradient(weights))
    left_out = sum(loss_weights()[n] * sum(MASKS[n]) for n in range(6) if weights[n] and not weights[n][0])
    assert metrics["opsm_clipfrac"] == pytest.approx(left_out)


def test_the_cases_above_are_not_trivial():
    first = [oracle(make_scene(seed=10), delta) for delta in (1e-4, 0.3)]
    assert first[0] != first[1]
    assert 0.0 in np.concatenate(first[0])
    assert any(row and row[0] for row, a in zip(first[0], ADVANTAGE, strict=True) if a < 0)


def test_order_and_garbage_at_masked_tokens_do_not_matter(correction):
    plain, metrics = train(make_scene(seed=10), correction("opsm"), {})
    order, splits = [4, 1, 5, 3, 2, 0], [[2], [1, 5, 0], [3, 4]]
    moved, of_moved = train(make_scene(seed=10, garbage=True), correction("opsm"), {}, order=order, splits=splits)
    assert_same(moved, plain, 1e-12)
    assert of_moved == pytest.approx(metrics)


def test_numbers_by_hand(correction):
    """Sample 3 has A < 0 and four trained tokens, which moved by 0.4, 0, 0 and 0: a mean of 0.1."""
    scene = make_scene(gap=0.0, move=0.0)
    scene.current[3][0] -= 0.4
    for delta, out in ((0.09, True), (0.11, False)):
        got, metrics = train(scene, correction("opsm"), {"opsm_delta": delta})
        assert (got[3] == 0).all() == out
        assert metrics["opsm_clipfrac"] == pytest.approx(1 / 5 if out else 0.0)
    # The same move of a good response is left alone.
    scene = make_scene(gap=0.0, move=0.0)
    scene.current[0][0] -= 4.0
    assert train(scene, correction("opsm"), {})[1]["opsm_clipfrac"] == 0


def test_the_engines_log_probs_are_not_asked_for(correction):
    """Need by need: with use_rollout_logprobs the old ones are the engine's already."""
    assert correction("opsm").needs == {"old_log_probs"}
    assert correction("opsm").compares_with_old
