"""What samples earn from several rewards, who chooses them, and what follows when one fails."""

from dataclasses import replace

import numpy as np
import pytest

from slime_core.algorithm.build_batch import build_batch
from slime_core.config.part import PluginSpec
from slime_core.contracts.reward import RewardFailure, SpanRewards
from slime_core.errors import RewardError, RewardTimeout, RewardUnavailable
from slime_core.rollout.rewards import RewardResult, result_of, verdict_on
from slime_core.rollout.scoring import ScoringPlan, WeightedReward, score_group
from slime_core.types.sample import SpanReward, Status


def spec(name):
    return PluginSpec(group="slime.rewards", name=name, options={})


class Judge:
    """Verdicts by reward and sample index."""

    def __init__(self, **numbers):
        self.numbers = numbers
        self.asked = []

    async def judge(self, spec, group, reward_key, *, retries=0):
        self.asked.append((spec.name, [sample.index for sample in group.samples], reward_key, retries))
        found = [self.numbers[spec.name](sample) for sample in group.samples]
        return [v if isinstance(v, RewardResult) else RewardResult(value=v) for v in found]


def plan(*rewards, **rules):
    return ScoringPlan(rewards=tuple(WeightedReward(spec=spec(r["label"]), **r) for r in rewards), **rules)


def unscored(make_group, metadata=({},) * 4):
    group = make_group([None] * len(metadata))
    samples = [replace(s, status=Status.COMPLETED, metadata=m) for s, m in zip(group.samples, metadata, strict=True)]
    return replace(group, samples=tuple(samples))


async def test_several_rewards_add_up_and_are_kept_apart(make_group):
    group = unscored(make_group)
    judge = Judge(
        math=lambda s: RewardResult(value=float(s.index % 2), parts={"acc": 1.0}),
        length=lambda s: RewardResult(value=-2.0, spans=(SpanReward(0, 1, -2.0),)),
    )
    both = plan({"label": "math", "reward_key": "acc"}, {"label": "length", "weight": 0.25}, retries=3)
    scored, failed = await score_group(judge, both, group)
    assert not failed
    assert [s.reward for s in scored.samples] == [float(s.index % 2) - 0.5 for s in group.samples]
    assert scored.samples[0].reward_parts == {"math": group.samples[0].index % 2, "math/acc": 1.0, "length": -2.0}
    assert scored.samples[0].span_rewards == (SpanReward(0, 1, -0.5),)
    everyone = [sample.index for sample in group.samples]
    assert judge.asked == [("math", everyone, "acc", 3), ("length", everyone, None, 3)]


async def test_samples_choose_among_the_rewards_of_the_run(make_group):
    group = unscored(make_group, ({"rm": "b"}, {"rm": ["a", "b"]}, {}, {"rm": "a"}))
    judge = Judge(a=lambda s: 1.0, b=lambda s: 10.0)
    two = plan({"label": "a"}, {"label": "b"}, choice_key="rm")
    scored, _ = await score_group(judge, two, group)
    assert [s.reward for s in scored.samples] == [10.0, 11.0, 11.0, 1.0]
    assert scored.samples[0].reward_parts == {"b": 10.0}
    for given in ("math", "b.py", ["a", "x"]):
        with pytest.raises(RewardError, match=r"metadata\.rm = .*unknown reward of this run.*Available: a, b\."):
            await score_group(judge, two, unscored(make_group, ({"rm": given},)))
    for given in (3, [], {"a": 1}):
        with pytest.raises(RewardError, match="no name of a reward"):
            await score_group(judge, two, unscored(make_group, ({"rm": given},)))


FAILURES = {"wrong": RewardError("w"), "timeout": RewardTimeout("t"), "infra": RewardUnavailable("i")}


def failing(outcome):
    """The second sample has no reward, for this reason."""
    numbers = iter([1.0, RewardResult(failure=FAILURES[outcome]), 0.0, 1.0])
    return Judge(a=lambda s: next(numbers), b=lambda s: 1.0)


@pytest.mark.parametrize("outcome", FAILURES)
async def test_each_kind_of_failure_has_its_policy(make_group, outcome):
    group = unscored(make_group)
    others = {name: "error" for name in FAILURES if name != outcome}
    two = plan({"label": "a"}, {"label": "b", "weight": 0.5})

    scored, failed = await score_group(failing(outcome), replace(two, policies={outcome: "zero", **others}), group)
    assert [s.reward for s in scored.samples] == [1.5, 0.0, 0.5, 1.5]
    assert failed == {1: FAILURES[outcome]}

    scored, _ = await score_group(failing(outcome), replace(two, policies={outcome: "mask", **others}), group)
    assert [s.reward for s in scored.samples] == [1.5, None, 0.5, 1.5]
    assert [s.status for s in scored.samples] == [Status.COMPLETED] * 4
    batch = build_batch([scored])
    assert np.isnan(batch.reward[1])
    assert batch.num_trainable[1] == 0 < batch.num_trainable[0]

    scored, _ = await score_group(failing(outcome), replace(two, policies={outcome: "fail_sample", **others}), group)
    assert [s.status for s in scored.samples] == [Status.COMPLETED, Status.FAILED, *[Status.COMPLETED] * 2]
    assert scored.samples[1].remove_sample
    assert scored.samples[1].reward is None

    for policies in ({}, {outcome: "error"}):
        with pytest.raises(type(FAILURES[outcome])):
            await score_group(failing(outcome), replace(two, policies=policies), group)


async def test_a_group_without_scored_samples_has_failed(make_group):
    judge = Judge(a=lambda s: RewardResult(failure=FAILURES["infra"]))
    scored, failed = await score_group(judge, plan({"label": "a"}, policies={"infra": "mask"}), unscored(make_group))
    assert {s.status for s in scored.samples} == {Status.FAILED}
    assert len(failed) == 4


def test_a_sample_may_fail_by_itself(make_group):
    sample = make_group([None]).samples[0]
    verdict = verdict_on(sample, RewardFailure("infra", "the service responded 500"), None, 'reward "a" on row 1')
    assert isinstance(verdict.failure, RewardUnavailable)
    assert str(verdict.failure).startswith('reward "a" on row 1: the service responded 500. ')
    assert verdict_on(sample, 1, None, "").value == 1.0


def test_rewards_of_spans(make_group):
    """Seven tokens, of which the fourth and fifth are a tool's."""
    sample = long_sample(make_group, [1, 1, 1, 0, 0, 1, 1])
    value = SpanRewards([SpanReward(0, 2, 0.5), SpanReward(2, 5, -1.0), SpanReward(3, 5, 4.0)], outcome=0.25)
    result = result_of(sample, value, None, "here")
    done = replace(sample, reward=result.value, span_rewards=result.spans)
    assert done.reward == pytest.approx(0.5 - 1.0 + 4.0 + 0.25)
    batch = build_batch([replace(make_group([0.0]), samples=(done, replace(sample, reward=2.0)))])
    # The third span has no trained token: its 4 belong to the rest of the reward.
    assert batch.token_reward.tolist() == [0, 0.5, -1.0, 0, 0, 0, 0] + [0] * 7
    assert batch.take(np.array([1, 0])).token_reward.tolist() == [0] * 7 + [0, 0.5, -1.0, 0, 0, 0, 0]
    for start, end in ((-1, 2), (2, 2), (5, 8)):
        with pytest.raises(RewardError, match=rf"here: rewards tokens {start} to {end} of a response of 7"):
            result_of(sample, SpanRewards([SpanReward(start, end, 1.0)]), None, "here")
    with pytest.raises(RewardError, match="finite"):
        result_of(sample, SpanRewards([SpanReward(0, 1, float("nan"))]), None, "here")


def test_removed_samples_have_no_token_rewards(make_group):
    sample = long_sample(make_group, [1] * 3)
    result = result_of(sample, SpanRewards([SpanReward(0, 1, 1.0)]), None, "")
    done = replace(sample, reward=result.value, span_rewards=result.spans, remove_sample=True)
    batch = build_batch([replace(make_group([0.0]), samples=(done,))])
    assert not batch.token_reward.any()
    assert not batch.mask.any()


def long_sample(make_group, mask):
    sample = make_group([None]).samples[0]
    length = len(mask)
    return replace(
        sample,
        status=Status.COMPLETED,
        tokens=np.concatenate([sample.prompt.token_ids, np.arange(length, dtype=np.int32)]),
        prompt_length=len(sample.prompt.token_ids),
        loss_mask=np.array(mask, np.uint8),
        rollout_log_probs=np.zeros(length, np.float32),
        spans=(),
    )
