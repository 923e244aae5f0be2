"""Metrics against enumeration and numbers by hand."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.algorithm.metrics import (
    category_metrics,
    column_metrics,
    correct_metrics,
    count_metrics,
    distribution,
    generation_metrics,
    group_metrics,
    multi_turn_metrics,
    pass_at_k,
    pass_rate_metrics,
    repetition_metrics,
    reward_part_metrics,
    rollout_metrics,
    step_metrics,
    zero_std_metrics,
)
from slime_core.controller.evaluate import set_metrics


def enumerated(n, correct, k):
    """The share of subsets of size k with a correct response."""
    subsets = list(itertools.combinations(range(n), k))
    return sum(any(response < correct for response in subset) for subset in subsets) / len(subsets)


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
    # C(3, 2) / C(4, 2) = 1 / 2 of the pairs miss the one correct response.
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
        "rollout/zero_std/frac": 0.0,
        # Of a sample: the version at consumption less its oldest. One is 1 behind, the other 3.
        "rollout/staleness/mean": 2.0,
        "rollout/staleness/max": 3.0,
        "rollout/staleness/count_1": 1.0,
        "rollout/staleness/count_3": 1.0,
    }


def test_rollout_metrics_of_a_batch_with_nothing_to_train(make_batch):
    batch = make_batch([(1, 0), (2, 0)], reward=[np.nan, np.nan])
    metrics = rollout_metrics(batch, 1)
    assert metrics["rollout/raw_reward"] == 0
    assert "rollout/staleness/mean" not in metrics
    assert "rollout/rollout_log_probs" not in metrics
    assert column_metrics(batch, {"log_probs": np.empty(0, np.float32)}) == {}


def of_rewards(make_batch, groups, **given):
    """A batch of one-token responses; `groups` are lists of rewards."""
    number = [n for n, rewards in enumerate(groups) for _ in rewards]
    return make_batch([(1, 1)] * len(number), group=number, reward=[r for group in groups for r in group], **given)


def test_groups_of_equal_rewards_are_counted_by_reward(make_batch):
    nan = np.nan
    batch = of_rewards(
        make_batch,
        [
            [1.0, 1.0],
            [1.0, 0.0],
            [0.0, -0.0, 0.0],
            [1.0, 1.0, nan],
            [0.3] * 3,
            [0.32, 0.32],
            [1.0],
            [nan, 2.0],
            [nan, nan],
            [0.5, 0.5 + 1e-9],
        ],
    )
    assert zero_std_metrics(batch) == {
        # Of the seven groups with at least two scored samples.
        "rollout/zero_std/frac": 5 / 7,
        "rollout/zero_std/count_0.0": 1,
        "rollout/zero_std/count_0.3": 2,
        "rollout/zero_std/count_1.0": 2,
    }
    # Groups are formed by key, not by position.
    assert zero_std_metrics(batch.take(np.arange(batch.num_samples)[::-1])) == zero_std_metrics(batch)
    assert "rollout/zero_std/count_1.0" in rollout_metrics(batch, 0)


def test_pass_rate_over_groups_with_fail_or_pass(make_batch):
    batch = of_rewards(make_batch, [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, np.nan]])
    metrics = pass_rate_metrics(batch)
    assert metrics["rollout/passrate/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert metrics["rollout/passrate/pass@2"] == pytest.approx((enumerated(4, 2, 2) + enumerated(4, 1, 2)) / 2)
    assert metrics["rollout/passrate/pass@4"] == 1
    assert metrics.items() <= rollout_metrics(batch, 0).items()
    signed = of_rewards(make_batch, [[1.0, -1.0, -1.0, 1.0], [-1.0, -1.0, 1.0, np.nan]])
    assert pass_rate_metrics(signed) == metrics


def test_a_rollout_of_several_samples_passes_once_and_as_a_whole(make_batch):
    batch = of_rewards(make_batch, [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], rollout_id=[0, 0, 1, 2, 2, 3])
    assert pass_rate_metrics(batch) == {"rollout/passrate/pass@1": 0.25, "rollout/passrate/pass@2": 0.5}


@pytest.mark.parametrize("groups", [[[1.0, 0.5]], [[1.0, 0.0, -1.0]], [[1.0], [0.0, 1.0]], [[np.nan, np.nan]], []])
def test_no_pass_rate_without_pass_and_fail(make_batch, groups):
    assert pass_rate_metrics(of_rewards(make_batch, groups)) == {}


def test_rollouts_of_each_optimizer_step(make_batch):
    # Samples 0 and 1 are one rollout; the last step is short.
    batch = make_batch([(1, 1)] * 6, rollout_id=[0, 0, 1, 2, 3, 4])
    assert step_metrics(batch, np.array([0, 0, 0, 1, 1, 2])) == [
        {"global_batch_size": 2},
        {"global_batch_size": 2},
        {"global_batch_size": 1},
    ]


def test_responses_that_repeat_themselves(make_group):
    rng = np.random.default_rng(0)
    varied = "".join(chr(c) for c in rng.integers(33, 0x2000, 12_000))
    texts = ["the cat sat. " * 1000, varied, "the cat sat. " * 700, varied + "na" * 5000, "na" * 5000 + varied, ""]
    samples = [replace(make_group([1.0]).samples[0], response=text) for text in texts]
    # A short text is no repetition, and only the end counts.
    assert len(texts[2]) < 10_000
    assert repetition_metrics(samples) == {"rollout/repetition_frac": 2 / 6}
    assert repetition_metrics([]) == {}


def test_column_metrics_are_means_over_trained_tokens(make_batch):
    batch = make_batch([(1, 3)], masks=[[1, 0, 1]])
    assert column_metrics(batch, {"values": np.array([1, np.nan, 4], np.float32)}) == {"rollout/values": 2.5}


def test_counts_are_averaged_over_all_samples(make_group):
    first, second, third = make_group([1.0, 2.0, 3.0]).samples
    counted = [replace(first, counts={"turns": 2, "searches": 1}), replace(second, counts={"turns": 1}), third]
    assert count_metrics(counted, "p") == {"p/turns": 1.0, "p/searches": pytest.approx(1 / 3)}


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


def test_pass_at_k_needs_more_than_one_response(make_group):
    metrics = set_metrics(Settings, [make_group([1.0]), make_group([0.0])])
    assert metrics["eval/held_out"] == 0.5
    assert not [name for name in metrics if "pass@" in name]
    assert set_metrics(Settings, [])["eval/held_out"] == 0


def test_the_threshold_decides_what_passes(make_group):
    class Lenient(Settings):
        pass_threshold = 0.5

    assert set_metrics(Lenient, [make_group([0.5, 0.4])])["eval/held_out-pass@1"] == 0.5


def test_the_rewards_of_a_group_spread(make_batch):
    nan = np.nan
    metrics = group_metrics(of_rewards(make_batch, [[1.0, 0.0], [2.0, 2.0, nan], [5.0, nan], [nan]]))
    # Standard deviations 0.5 and 0; the third has one scored sample, the fourth none.
    assert metrics["rollout/groups"] == 3
    assert (metrics["rollout/group_reward_std/mean"], metrics["rollout/group_reward_std/max"]) == (0.25, 0.5)
    assert group_metrics(of_rewards(make_batch, [[nan]])) == {}


def test_pass_rates_of_other_rewards_are_logged_where_asked_for(make_batch):
    batch = of_rewards(make_batch, [[1.0, 0.5], [0.2, 0.3]])
    assert pass_rate_metrics(batch) == {}
    assert pass_rate_metrics(batch, always=True) == {"rollout/passrate/pass@1": 0.25, "rollout/passrate/pass@2": 0.5}


def test_correct_samples(make_batch):
    batch = make_batch([(1, 2), (1, 3), (1, 0), (1, 1)], reward=[1.0, 0.0, 1.0, np.nan])
    entropy = np.array([1, 2, 9, 9, 9, 9], np.float32)
    metrics = correct_metrics(batch, entropy)
    trained = batch.mask[:2].astype(bool)
    assert metrics["rollout/correct/frac"] == 0.5
    assert metrics["rollout/correct/response_len/max"] == trained.sum()
    assert metrics["rollout/correct/entropy"] == pytest.approx(entropy[:2][trained].mean())
    assert "rollout/correct/entropy" not in correct_metrics(batch, None)


def test_turns_are_runs_of_the_models_tokens(make_group):
    masks = [[1, 1, 0, 0, 1], [0, 1, 0], [], [1, 1, 1]]
    samples = [
        replace(sample, loss_mask=np.array(mask, np.uint8), tokens=np.arange(2 + len(mask), dtype=np.int32))
        for sample, mask in zip(make_group([1.0] * 4).samples, masks, strict=True)
    ]
    metrics = multi_turn_metrics(samples)
    assert metrics["rollout/multi_turn/turns/mean"] == (2 + 1 + 0 + 1) / 4
    assert metrics["rollout/multi_turn/turn_len/mean"] == (2 + 1 + 1 + 3) / 4
    assert metrics["rollout/multi_turn/response_len/mean"] == (5 + 3 + 0 + 3) / 4
    assert metrics["rollout/multi_turn/response_len_without_environment/mean"] == (3 + 1 + 0 + 3) / 4
    assert multi_turn_metrics([]) == {}


def test_categories_are_the_values_of_a_part(make_group):
    parts = [{"kind": 2.0}, {"kind": 0.5}, {"kind": 2.0}, {}]
    samples = make_group([1.0] * 4, parts=parts).samples
    assert category_metrics(samples, "kind") == {"rollout/error_cat/0.5": 0.25, "rollout/error_cat/2": 0.5}


def test_the_speed_of_a_rollout(make_group):
    samples = [*make_group([1.0], length=6).samples, *make_group([None], length=2).samples]
    samples[1] = replace(samples[1], remove_sample=True)
    assert generation_metrics(samples, 2.0, 4) == {
        "perf/tokens_per_gpu_per_sec": 1.0,
        "perf/effective_tokens_per_gpu_per_sec": 0.75,
        "perf/longest_sample_tokens_per_sec": 3.0,
    }
