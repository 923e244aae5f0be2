"""Buffer filters: which waiting groups go next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from slime_core.contracts.example import FilterExample
from slime_core.contracts.filter import Versions
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.sample import Sample, VersionSpan
from slime_plugin_kit.case import Case
from slime_plugin_kit.groups import frozen, odd_groups


def waiting(case: Case) -> list[BufferItem]:
    """Returned prompts, partial and finished groups, of several policy versions."""
    items = []
    examples = case.examples(FilterExample)
    groups = odd_groups([metadata for example in examples for metadata in example.metadata] or [{}])
    for number, group in enumerate(groups.values()):
        kind = (ItemKind.RETURNED, ItemKind.PARTIAL, ItemKind.SURPLUS)[number % 3]
        samples = tuple(written_by(sample, number % 4) for sample in group.samples)
        items.append(
            BufferItem(
                prompt=replace(group.prompt, group_index=number),
                kind=kind,
                samples=() if kind is ItemKind.RETURNED else samples,
                added_step=number // 2,
                start_rollout_id=0,
            )
        )
    return items


def versions_of(items: Sequence[BufferItem], *, trained: int = 4, max_staleness: int = 2) -> Versions:
    return Versions(trained=trained, max_staleness=max_staleness, oldest=tuple(item.oldest_version for item in items))


def written_by(sample: Sample, version: int) -> Sample:
    return replace(sample, spans=tuple(VersionSpan(version, start, end) for _, start, end in sample.spans))


def test_chooses_positions_that_are_there(case: Case) -> None:
    finished = [item for item in waiting(case) if item.kind is ItemKind.SURPLUS]
    ages = [{"trained": 4, "max_staleness": 0}, {"trained": 0, "max_staleness": 0}, {"trained": 9, "max_staleness": 50}]
    for count, age in itertools.product((0, 1, 3, len(waiting(case)), 100), ages):
        for items in (waiting(case), finished, waiting(case)[:1], []):
            chosen = case.build().select(items, count, versions_of(items, **age))
            assert len(chosen) <= count, f"of {count} requested it chooses {len(chosen)}"
            assert len(set(chosen)) == len(chosen), f"it chooses a position twice: {chosen}"
            assert set(chosen) <= set(range(len(items))), f"of {len(items)} items it chooses {chosen}"


def test_chooses_the_same_twice(case: Case) -> None:
    one, other, items = case.build(), case.build(), waiting(case)
    versions = versions_of(items)
    first = one.select(items, 4, versions)
    # A choice that depends on the ones before would not be repeated by a replay.
    one.select(items[:2], 1, versions_of(items[:2], trained=3))
    assert one.select(items, 4, versions) == first, "called again it chooses others"
    assert other.select(waiting(case), 4, versions) == first, "another instance chooses others"


def test_items_are_left_alone(case: Case) -> None:
    items = waiting(case)
    before = frozen(items)
    case.build().select(items, 4, versions_of(items))
    assert frozen(items) == before, "the items are others afterwards"
