"""Group filters: which finished groups are trained on."""

from __future__ import annotations

import re

from slime_core.contracts.example import FilterExample
from slime_core.contracts.filter import FilterDecision
from slime_core.types.sample import SampleGroup
from slime_plugin_kit.case import Case
from slime_plugin_kit.groups import frozen, odd_groups

REASON = re.compile(r"[\w.+-]+")


def groups_of(case: Case, *, odd: bool = False) -> dict[str, SampleGroup]:
    """Groups by name: those whose samples all have a reward, or with `odd` all that a run may pass to a filter."""
    examples = case.examples(FilterExample)
    groups = odd_groups([metadata for example in examples for metadata in example.metadata] or [{}])
    return {label: group for label, group in groups.items() if odd or len(group.rewards) == len(group.samples)}


def test_decides_the_same_twice(case: Case) -> None:
    judge, another = case.build(), case.build()
    for label, group in groups_of(case).items():
        first = judge.decide(group)
        assert judge.decide(group) == first, f"{label}: called again it decides otherwise than {first}"
        assert another.decide(group) == first, f"{label}: another instance decides otherwise than {first}"


def test_groups_are_left_alone(case: Case) -> None:
    for label, group in groups_of(case).items():
        before = frozen(group)
        case.build().decide(group)
        assert frozen(group) == before, f"{label}: the group is another one afterwards"


def test_odd_groups_are_judged(case: Case) -> None:
    for label, group in groups_of(case, odd=True).items():
        decision = case.build().decide(group)
        assert isinstance(decision, FilterDecision), f"{label}: it returns {decision!r}, not a FilterDecision"
        assert isinstance(decision.keep, bool), f"{label}: keep is {decision.keep!r}, not a bool"
        outside = [place for place in decision.masked_indices if not 0 <= place < len(group.samples)]
        assert not outside, f"{label}: untrained positions {outside} are not in a group of {len(group.samples)}"


def test_a_drop_has_a_reason(case: Case) -> None:
    for label, group in groups_of(case).items():
        decision = case.build().decide(group)
        if not decision.keep:
            fits = REASON.fullmatch(decision.reason)
            assert fits, f"{label}: the reason is {decision.reason!r}; use letters, digits, _ . + and -"
