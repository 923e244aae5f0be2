"""Rewards: one number for each response to a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from slime_core.contracts.example import RewardExample
from slime_core.rollout.rewards import RewardPool, result_of
from slime_core.rollout.scoring import ScoringPlan, WeightedReward, score_group
from slime_core.types.sample import SampleGroup
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same
from slime_plugin_kit.event_loop import run
from slime_plugin_kit.groups import frozen, group_of

RESPONSES = (
    "4",
    "",
    "The answer is \\boxed{4}.",
    "5",
    "<think>2 and 2 make 4</think>\nAnswer: 4",
    "2 + 2 = 4, so\n#### 4",
    "I do not know",
    "4 " * 50,
    "²√\u00e9\U0001f600 \\frac{8}{2}\x00",
)
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[object, RewardPool]]:
    """A pool for each set of plugin files, so that a worker process starts once."""
    made: dict[object, RewardPool] = {}
    yield made
    for pool in made.values():
        pool.close()


def examples(case: Case) -> list[RewardExample]:
    """Its own, or else a sum with right, wrong and odd responses."""
    return case.examples(RewardExample) or [RewardExample(prompt="2+2=", label="4", responses=RESPONSES)]


def groups_of(case: Case) -> list[SampleGroup]:
    return [group_of(example.responses, example=example) for example in examples(case)]


def key_of(case: Case, values: Sequence[object]) -> str | None:
    """The name of the number that counts, if it gives named ones."""
    if not values or not isinstance(values[0], dict):
        return None
    key: str | None = case.driver.reward_key
    return key or sorted(values[0])[0]


def numbers(case: Case, group: SampleGroup) -> list[float]:
    """What each sample earns, as the kernel takes it; RewardError if it is not a finite number."""
    values = [*case.build().score(group)]
    assert len(values) == len(group.samples), f"{len(values)} values for {len(group.samples)} samples"
    key = key_of(case, values)
    done = [result_of(s, value, key, case.entry.name) for s, value in zip(group.samples, values, strict=True)]
    return [result.value for result in done if result.value is not None]


def test_examples_get_their_rewards(case: Case) -> None:
    for of in case.subject.cases:
        for example in of.examples(RewardExample):
            if example.rewards is not None:
                got = numbers(of, group_of(example.responses, example=example))
                label = f"responses to {example.prompt!r} with {of.label or 'its defaults'}"
                require_same(label, got, example.rewards, tolerance=1e-6)


def test_every_sample_gets_a_finite_number(case: Case) -> None:
    for group in groups_of(case):
        assert len(numbers(case, group)) == len(group.samples)
        values = [*case.build().score(group)]
        names = {tuple(sorted(value)) if isinstance(value, dict) else None for value in values}
        assert len(names) == 1, f"samples get different kinds of numbers: {names}"
        key = case.driver.reward_key
        assert key is None or key in (names.pop() or ()), (
            f"its driver declares reward_key {key!r}, which it does not return"
        )


def test_order_changes_nothing(case: Case) -> None:
    for group in groups_of(case):
        first, *others = group.samples
        straight = numbers(case, group)
        turned = numbers(case, replace(group, samples=group.samples[::-1]))
        require_same("the same samples in the opposite order", turned[::-1], straight, tolerance=0)
        shifted = numbers(case, replace(group, samples=(*others, first)))
        require_same("the same samples, the first one last", [shifted[-1], *shifted[:-1]], straight, tolerance=0)


def test_scores_the_same_twice(case: Case) -> None:
    reward, another = case.build(), case.build()
    for group in groups_of(case):
        first = list(reward.score(group))
        assert list(reward.score(group)) == first, "called again it gives other numbers"
        assert list(another.score(group)) == first, "another instance gives other numbers"


def test_an_empty_response_is_scored(case: Case) -> None:
    for example in examples(case):
        assert len(numbers(case, group_of(("",), example=example))) == 1
        assert len(numbers(case, group_of(("", "4", ""), example=example))) == 3


def test_groups_are_left_alone(case: Case) -> None:
    for group in groups_of(case):
        before = frozen(group)
        case.build().score(group)
        assert frozen(group) == before, "the group is another one afterwards"


def test_scores_the_same_in_a_worker_process(case: Case, pools: dict[object, RewardPool]) -> None:
    files = case.subject.registry.plugin_files
    if files not in pools:
        pools[files] = RewardPool(files, workers=1, timeout_s=TIMEOUT_S)
    for group in groups_of(case):
        here = numbers(case, group)
        key = key_of(case, list(case.build().score(group)))
        alone = WeightedReward(spec=case.part.spec(), label=case.entry.name, reward_key=key)
        there, _ = run(score_group(pools[files], ScoringPlan(rewards=(alone,)), group))
        got = [sample.reward for sample in there.samples if sample.reward is not None]
        require_same("rewards from a worker process", got, here, tolerance=0)
