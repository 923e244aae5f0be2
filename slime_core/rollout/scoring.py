"""Scoring: the rewards of a run for one group: their weighted sum, and the policy for failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from slime_core.config.bound import BoundReward
from slime_core.config.part import PluginSpec
from slime_core.config.rollout import RewardPolicy, RolloutConfig
from slime_core.contracts.reward import Outcome
from slime_core.errors import RewardError, unknown_name
from slime_core.rollout.failures import with_failure
from slime_core.rollout.rewards import RewardResult
from slime_core.types.sample import Sample, SampleGroup, SpanReward, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedReward:
    """One of the run's rewards."""

    spec: PluginSpec
    label: str
    weight: float = 1.0
    reward_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPlan:
    """Rewards of a run and the policies for failures, from the config."""

    rewards: tuple[WeightedReward, ...]
    choice_key: str | None = None
    """Metadata key of the rewards that count for a sample; None: all count."""
    retries: int = 0
    policies: Mapping[str, RewardPolicy] = field(default_factory=dict)
    """By outcome; `error` for missing ones."""

    @classmethod
    def of(cls, rewards: Sequence[BoundReward], rollout: RolloutConfig) -> ScoringPlan | None:
        """None: no reward."""
        if not rewards:
            return None
        given: dict[str, RewardPolicy | None] = {
            Outcome.WRONG: rollout.on_reward_error,
            Outcome.TIMEOUT: rollout.on_reward_timeout,
            Outcome.INFRA: rollout.on_reward_infra,
        }
        return cls(
            rewards=tuple(
                WeightedReward(spec=r.part.spec(), label=r.label, weight=r.weight, reward_key=r.reward_key)
                for r in rewards
            ),
            choice_key=rollout.reward_select_key,
            retries=rollout.reward_retries,
            policies={outcome: policy or rollout.on_reward_failure for outcome, policy in given.items()},
        )


class Judge(Protocol):
    """Interface of the reward pool."""

    async def judge(
        self, spec: PluginSpec, group: SampleGroup, reward_key: str | None, *, retries: int = 0
    ) -> list[RewardResult]: ...


async def score_group(
    pool: Judge, plan: ScoringPlan, group: SampleGroup
) -> tuple[SampleGroup, Mapping[int, RewardError]]:
    """Returns the group with rewards, and the failures by position, for which the plan's policies apply. Aborted,
    failed and already rewarded samples are not scored. Raises RewardError where the policy is `error`."""
    asked = [n for n, sample in enumerate(group.samples) if is_scored(sample)]
    if not asked:
        return group, {}
    chosen = {n: choose(plan, group.samples[n]) for n in asked}
    members = [[n for n in asked if reward.label in chosen[n]] for reward in plan.rewards]
    parts = [replace(group, samples=tuple(group.samples[n] for n in places)) for places in members]
    responses = await asyncio.gather(
        *(
            pool.judge(reward.spec, part, reward.reward_key, retries=plan.retries)
            for reward, part in zip(plan.rewards, parts, strict=True)
        )
    )
    verdicts: dict[int, dict[str, RewardResult]] = {n: {} for n in asked}
    for reward, places, of_reward in zip(plan.rewards, members, responses, strict=True):
        for n, verdict in zip(places, of_reward, strict=True):
            verdicts[n][reward.label] = verdict
    samples, failures = list(group.samples), {}
    for n in asked:
        failure = next((v.failure for v in verdicts[n].values() if v.failure is not None), None)
        if failure is None:
            try:
                samples[n] = rewarded_by(plan, samples[n], verdicts[n])
                continue
            except RewardError as error:
                failure = error
        policy = plan.policies.get(failure.outcome, "error")
        if policy == "error":
            raise failure
        failures[n] = failure
        samples[n] = without_reward(samples[n], policy)
    if failures and all(sample.reward is None for sample in samples):
        # Without any reward there is nothing to learn from or to compare with.
        samples = [without_reward(sample, "fail_sample") for sample in samples]
    for n, failure in failures.items():
        if samples[n].status is Status.FAILED:
            samples[n] = with_failure(samples[n], failure)
    return replace(group, samples=tuple(samples)), failures


def is_scored(sample: Sample) -> bool:
    return sample.reward is None and sample.status not in (Status.ABORTED, Status.FAILED)


def choose(plan: ScoringPlan, sample: Sample) -> frozenset[str]:
    """Labels of the rewards that count for the sample."""
    labels = [reward.label for reward in plan.rewards]
    given: Any = None if plan.choice_key is None else sample.metadata.get(plan.choice_key)
    if given is None:
        return frozenset(labels)
    names = [given] if isinstance(given, str) else given
    where = f"{sample.prompt.origin or f'group {sample.group_index}'}: metadata.{plan.choice_key}"
    if not isinstance(names, (list, tuple)) or not names:
        raise RewardError(f"{where} = {given!r}: no name of a reward. Set a name, or a list of names.")
    for name in names:
        if name not in labels:
            hint = "Data may choose among the rewards that the run file names, and no others."
            raise RewardError(unknown_name(where, str(name), "reward of this run", labels, hint=hint))
    return frozenset(names)


def rewarded_by(plan: ScoringPlan, sample: Sample, verdicts: Mapping[str, RewardResult]) -> Sample:
    """The sample with the weighted sum. With several rewards, parts have each one's number, and named numbers as LABEL/NAME."""
    if len(plan.rewards) == 1:
        (verdict,) = verdicts.values()
        parts = dict(verdict.parts)
    else:
        parts = {}
        for label, verdict in verdicts.items():
            assert verdict.value is not None
            parts[label] = verdict.value
            parts |= {f"{label}/{name}": number for name, number in verdict.parts.items()}
    weight = {reward.label: reward.weight for reward in plan.rewards}
    try:
        total = math.fsum(weight[label] * (verdict.value or 0.0) for label, verdict in verdicts.items())
    except (OverflowError, ValueError):
        # Too large while it is added up, or infinities of both signs.
        total = math.inf
    if not math.isfinite(total):
        where = sample.prompt.origin or f"group {sample.group_index}"
        raise RewardError(
            f"{where}: the weighted sum of the rewards {parts or 'of this run'} is too large for a float."
        )
    spans = [
        SpanReward(start, end, weight[label] * value)
        for label, verdict in verdicts.items()
        for start, end, value in verdict.spans
    ]
    return replace(sample, reward=total, reward_parts=parts, span_rewards=tuple(spans))


def without_reward(sample: Sample, policy: RewardPolicy) -> Sample:
    """Applies the policy to a sample that could not be scored."""
    match policy:
        case "zero":
            return replace(sample, reward=0.0)
        case "mask":
            return replace(sample, reward=None, remove_sample=True)
    return replace(sample, status=Status.FAILED, reward=None, remove_sample=True)
