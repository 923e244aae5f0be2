"""Metrics against enumeration and numbers by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.evaluate import set_metrics
from slime_core.metrics import column_metrics, distribution, pass_at_k, reward_part_metrics, rollout_metrics


def enumerated(n, correct, k):
    """The share of subsets of size k that hold a correct answer."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(any(answer < correct for answer in subset) for subset in subsets) / len(subsets)


@given(
    prompts=st.lists(
        st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=4
    )
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_pass_at_k_is_the_share_of_subsets(prompts):
    estimates = pass_at_k(np.array([n for n, _ in prompts]), np.array([c for _, c in prompts]))
    fewest = min(n for n, _ in prompts)
    assert list(estimates) == [k for k in (1, 2, 4, 8) if k <= fewest]
    for k, estimate in estimates.items():
        assert estimate == pytest.approx(np.mean([enumerated(n, c, k) for n, c in prompts]))


def test_pass_at_k_by_hand_and_without_prompts():
    # C(3, 2) / C(4, 2) = 1 / 2 of the pairs miss the one correct answer.
    assert pass_at_k(np.array([4]), np.array([1])) == {1: 0.25, 2: 0.5, 4: 1.0}
    assert pass_at_k(np.array([], int), np.array([], int)) == {}
    # Large numbers neither overflow nor lose precision.
    assert pass_at_k(np.array([1000]), np.array([1]))[512] == pytest.approx(0.512)


def test_distribution():
    assert distribution("a", np.array([1, 2, 3, 10])) == {"a/mean": 4, "a/median": 2.5, "a/max": 10, "a/min": 1}
    assert distribution("a", np.array([])) == {}


def test_rollout_metrics_by_hand(make_batch):
    batch = make_batch(
        [(1, 2), (1, 3), (1, 0), (1, 1)],
        masks=[[1, 1], [1, 0, 1], [], [0]],
        reward=[1.0, 0.0, np.nan, 2.0],
        # A tool wrote -1; the second sample began under version 3.
        versions=[[5, 5], [3, -1, 5], [], [-1]],
    )
    batch.truncated[1] = True
    batch.rollout_log_probs[:] = [-1, -2, -3, 99, -4, 99]
    assert rollout_metrics(batch, 6) == {
        "rollout/raw_reward": 1.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/response_len/mean": 1.0,
        "rollout/response_len/median": 1.0,
        "rollout/response_len/max": 2.0,
        "rollout/response_len/min": 0.0,
        "rollout/rollout_log_probs": -2.5,
        # Of a sample: the version at consumption less its oldest. One is 1 behind, the other 3.
        "rollout/staleness/mean": 2.0,
        "rollout/staleness/max": 3.0,
    }


def test_rollout_metrics_of_a_batch_with_nothing_to_train(make_batch):
    batch = make_batch([(1, 0), (2, 0)], reward=[np.nan, np.nan])
    metrics = rollout_metrics(batch, 1)
    assert metrics["rollout/raw_reward"] == 0
    assert "rollout/staleness/mean" not in metrics
    assert "rollout/rollout_log_probs" not in metrics
    assert column_metrics(batch, {"log_probs": np.empty(0, np.float32)}) == {}


def test_column_metrics_are_means_over_trained_tokens(make_batch):
    batch = make_batch([(1, 3)], masks=[[1, 0, 1]])
    assert column_metrics(batch, {"values": np.array([1, np.nan, 4], np.float32)}) == {"rollout/values": 2.5}


def test_reward_parts_are_averaged_over_the_samples_that_have_them(make_group):
    group = make_group([1.0, 2.0, 3.0], parts=[{"acc": 1.0, "fmt": 0.5}, {"acc": 0.0}, {}])
    assert reward_part_metrics(group.samples, "p") == {"p/acc": 0.5, "p/fmt": 0.5}


class Settings:
    name = "held_out"
    pass_threshold = 1.0


def test_a_sets_metrics_by_hand(make_group):
    groups = [make_group([1.0, 0.0, 0.0, 0.5]), make_group([1.0, 1.0, None, 0.0])]
    metrics = set_metrics(Settings, groups)
    assert metrics["eval/held_out"] == pytest.approx(3.5 / 8)
    # One correct of four, two of four; the sample without a reward did not pass, and counts as failed.
    assert metrics["eval/held_out-pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert metrics["eval/held_out-pass@2"] == pytest.approx((enumerated(4, 1, 2) + enumerated(4, 2, 2)) / 2)
    assert metrics["eval/held_out-pass@4"] == 1
    assert metrics["eval/held_out-failed"] == 1
    assert metrics["eval/held_out-truncated_ratio"] == 0
    assert metrics["eval/held_out/response_len/mean"] == 2


def test_pass_at_k_needs_more_than_one_answer(make_group):
    metrics = set_metrics(Settings, [make_group([1.0]), make_group([0.0])])
    assert metrics["eval/held_out"] == 0.5
    assert not [name for name in metrics if "pass@" in name]
    assert set_metrics(Settings, [])["eval/held_out"] == 0


def test_the_threshold_decides_what_passes(make_group):
    class Lenient(Settings):
        pass_threshold = 0.5

    assert set_metrics(Lenient, [make_group([0.5, 0.4])])["eval/held_out-pass@1"] == 0.5
