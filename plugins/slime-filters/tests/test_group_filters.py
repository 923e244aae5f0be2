from dataclasses import replace

import numpy as np
import pytest

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.loss_weights import loss_weights
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.filter import FilterDecision
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status
from slime_filters.plugin import Length, NonzeroStd, OverlongFilter, PassRateBand
from slime_sources.group_filtering import judge, marked

KEEP = FilterDecision(keep=True)
PROMPT = Prompt(group_index=0, text="q", token_ids=np.array([1], np.int32))


def group(rewards: list[float | None], lengths: list[int] | None = None, truncated: int = 0) -> SampleGroup:
    lengths = lengths or [1] * len(rewards)
    samples = tuple(
        Sample(
            index=index,
            group_index=0,
            rollout_id=index,
            prompt=PROMPT,
            tokens=np.zeros(1 + length, np.int32),
            prompt_length=1,
            loss_mask=np.zeros(length, np.uint8),
            rollout_log_probs=np.zeros(length, np.float32),
            reward=reward,
            status=Status.TRUNCATED if index < truncated else Status.COMPLETED,
        )
        for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
    )
    return SampleGroup(prompt=PROMPT, samples=samples)


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([1.0, 0.0], ""),
        ([1.0, 1.0, 1.0, 0.0], ""),
        ([0.0, 0.0], "zero_std_0.0"),
        ([1.0, 1.0], "zero_std_1.0"),
        ([-1.0, -1.0], "zero_std_-1.0"),
        ([0.25, 0.25], "zero_std_0.2"),
        ([-0.04, -0.04], "zero_std_0.0"),
        # Equal, though the mean of three 0.1 is not 0.1 in floating point.
        ([0.1, 0.1, 0.1], "zero_std_0.1"),
        # Of [r, r + d] it is d / 2.
        ([0.0, 1.9e-6], "zero_std_0.0"),
        ([0.0, 2.1e-6], ""),
        ([1.0, 1.0 + 2**-20], "zero_std_1.0"),
        ([1.0, 1.0 + 2**-18], ""),
        # In float32 these two would be equal.
        ([100000.0, 100000.000004], ""),
        # One sample, or only one that is scored.
        ([1.0], "zero_std_1.0"),
        ([None, 1.0, None], "zero_std_1.0"),
        ([None, 1.0, 0.0], ""),
        ([None, None], "unscored"),
        ([], "unscored"),
    ],
)
def test_nonzero_std(rewards: list[float | None], reason: str) -> None:
    decision = NonzeroStd.build(NonzeroStd.Config()).decide(group(rewards))
    assert decision == (FilterDecision(keep=False, reason=reason) if reason else KEEP)


def test_nonzero_std_with_a_higher_bound() -> None:
    # The standard deviation of [0, 1] is 0.5, of [0, 0.9] 0.45.
    chosen = NonzeroStd.build(NonzeroStd.Config(min_std=0.48))
    assert chosen.decide(group([0.0, 1.0])).keep
    assert not chosen.decide(group([0.0, 0.9])).keep


@pytest.mark.parametrize(
    ("num_passed", "num_samples", "reason"),
    [
        (0, 10, "pass_rate_low"),
        (1, 10, ""),
        (5, 10, ""),
        (9, 10, ""),
        (10, 10, "pass_rate_high"),
        (3, 30, ""),
        (2, 30, "pass_rate_low"),
        (27, 30, ""),
        (28, 30, "pass_rate_high"),
    ],
)
def test_pass_rate_band(num_passed: int, num_samples: int, reason: str) -> None:
    rewards: list[float | None] = [1.0] * num_passed + [0.0] * (num_samples - num_passed)
    decision = PassRateBand.build(PassRateBand.Config()).decide(group(rewards))
    assert decision == (FilterDecision(keep=False, reason=reason) if reason else KEEP)


def test_pass_rate_band_counts_scored_samples_from_a_reward_on() -> None:
    half = PassRateBand.build(PassRateBand.Config(min_pass_rate=0.5, max_pass_rate=0.5, pass_reward=-0.5))
    assert half.decide(group([-0.5, -1.0, None, None])) == KEEP
    assert half.decide(group([-0.6, -1.0])).reason == "pass_rate_low"
    assert half.decide(group([0.3, -0.5])).reason == "pass_rate_high"
    assert half.decide(group([None])).reason == "unscored"


@pytest.mark.parametrize(
    ("lengths", "truncated", "reason"),
    [
        ([2, 8], 0, ""),
        ([2, 9], 0, "too_long"),
        ([1, 8], 0, "too_short"),
        ([0, 8], 0, "too_short"),
        ([2, 3, 4, 5], 2, ""),
        ([2, 3, 4, 5], 3, "truncated"),
        ([1, 9], 2, "truncated"),
        ([1, 9], 0, "too_long"),
    ],
)
def test_length(lengths: list[int], truncated: int, reason: str) -> None:
    chosen = Length.build(Length.Config(min_response_len=2, max_response_len=8, max_truncated_ratio=0.5))
    decision = chosen.decide(group([None] * len(lengths), lengths, truncated))
    assert decision == (FilterDecision(keep=False, reason=reason) if reason else KEEP)


@pytest.mark.parametrize(("truncated", "untrained"), [(0, ()), (2, (0, 1)), (3, (0, 1, 2))])
def test_overlong_filter_keeps_every_group_and_names_its_cut_responses(
    truncated: int, untrained: tuple[int, ...]
) -> None:
    chosen = OverlongFilter.build(OverlongFilter.Config())
    decision = chosen.decide(group([1.0, 0.0, None], truncated=truncated))
    assert decision == FilterDecision(keep=True, masked_indices=untrained)


def test_a_cut_response_trains_nothing_and_counts_in_its_group() -> None:
    """Three responses of 2, 4 and 3 tokens, the first cut off: mask 0 before anything is divided by."""
    finished = group([0.0, 1.0, 1.0], [2, 4, 3], truncated=1)
    samples = tuple(replace(s, loss_mask=np.ones(len(s.loss_mask), np.uint8)) for s in finished.samples)
    finished = replace(finished, samples=samples)
    decision = judge(finished, [OverlongFilter.build(OverlongFilter.Config())], insufficient=False)
    batch = build_batch([marked(finished, decision.masked_indices)])
    assert batch.mask.tolist() == [0] * 2 + [1] * 7
    assert batch.reward.tolist() == [0.0, 1.0, 1.0]
    assert batch.truncated.tolist() == [True, False, False]
    steps = np.zeros(3, np.int64)
    assert loss_weights(batch, steps, Aggregation.TOKEN_MEAN, 8)[2:].tolist() == [np.float32(1 / 7)] * 7
    # Its rollout still counts where rollouts are averaged.
    assert loss_weights(batch, steps, Aggregation.SEQ_MEAN, 8)[2:].sum() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("chosen", "dropped", "kept"),
    [
        (NonzeroStd.build(NonzeroStd.Config(keep_when_insufficient=True)), group([1.0, 1.0]), group([1.0, 0.0])),
        (PassRateBand.build(PassRateBand.Config(keep_when_insufficient=True)), group([1.0, 1.0]), group([1.0, 0.0])),
        (
            Length.build(Length.Config(max_response_len=1, keep_when_insufficient=True)),
            group([1.0], [2]),
            group([1.0], [1]),
        ),
    ],
)
def test_a_rejected_group_can_be_kept_when_candidates_run_out(chosen, dropped, kept) -> None:
    assert not chosen.decide(dropped).keep
    assert chosen.decide(dropped).keep_when_insufficient
    assert chosen.decide(kept) == KEEP
