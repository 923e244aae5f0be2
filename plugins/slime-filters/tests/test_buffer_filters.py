from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.errors import DataError
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, VersionSpan
from slime_filters.plugin import FreshFirst, OldestFirst, Priority

FRESH_FIRST = FreshFirst.build(FreshFirst.Config())


def item(*versions: int, metadata: Mapping[str, Any] | None = None) -> BufferItem:
    """A partial group with one token per version, each in a sample of its own; returned if there are none."""
    prompt = Prompt(
        group_index=3, text="q", token_ids=np.array([1], np.int32), metadata=metadata or {}, origin="train.jsonl:4"
    )
    samples = tuple(
        Sample(
            index=index,
            group_index=3,
            rollout_id=index,
            prompt=prompt,
            tokens=np.zeros(2, np.int32),
            prompt_length=1,
            loss_mask=np.ones(1, np.uint8),
            rollout_log_probs=np.zeros(1, np.float32),
            spans=(VersionSpan(version, 0, 1),),
        )
        for index, version in enumerate(versions)
    )
    kind = ItemKind.PARTIAL if samples else ItemKind.RETURNED
    return BufferItem(prompt=prompt, kind=kind, samples=samples, added_step=0)


def select(buffer_filter: BufferFilter, items: list[BufferItem], num_groups: int, **how: int) -> list[int]:
    versions = Versions(
        **{"trained": 9, "max_staleness": 9} | how, oldest=tuple(waiting.oldest_version for waiting in items)
    )
    return buffer_filter.select(items, num_groups, versions)


@pytest.mark.parametrize(
    ("num_groups", "order"), [(0, []), (1, [2]), (3, [2, 1, 4]), (5, [2, 1, 4, 0, 3]), (9, [2, 1, 4, 0, 3])]
)
def test_fresh_first(num_groups: int, order: list[int]) -> None:
    # The oldest versions are 1, 5, none, 0, 5; equal ones keep their order.
    items = [item(1, 9), item(5), item(), item(7, 0), item(6, 5)]
    assert select(FRESH_FIRST, items, num_groups) == order


def test_nothing_waits() -> None:
    assert select(FRESH_FIRST, [], 4) == []
    assert select(Priority.build(Priority.Config()), [], 4) == []


@pytest.mark.parametrize(("num_groups", "order"), [(0, []), (2, [1, 3]), (4, [1, 3, 2, 0])])
def test_priority(num_groups: int, order: list[int]) -> None:
    items = [item(metadata={"priority": value}) for value in (-1, 2.5, 0, 2.5)]
    assert select(Priority.build(Priority.Config()), items, num_groups) == order


def test_priority_under_another_key_with_a_default() -> None:
    chosen = Priority.build(Priority.Config(key="weight", default=1.0))
    items = [item(metadata={"weight": 0.5}), item(), item(metadata={"weight": 2, "priority": -9})]
    assert select(chosen, items, 3) == [2, 1, 0]


@pytest.mark.parametrize("value", [None, "high", True, float("nan")])
def test_unusable_priorities_name_the_prompt(value: object) -> None:
    with pytest.raises(DataError, match=r"metadata of train\.jsonl:4"):
        select(Priority.build(Priority.Config()), [item(metadata={"priority": value})], 1)


def test_a_missing_priority_names_the_key_to_set() -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:4 has no 'priority'.*rollout\.buffer_filter\.default"):
        select(Priority.build(Priority.Config()), [item()], 1)


@pytest.mark.parametrize(
    ("max_behind", "max_staleness", "order"),
    [
        # Trained next is version 9, and the oldest versions are 4, 8, none, 6, 8.
        (None, 9, [0, 3, 1, 4, 2]),
        # What is beyond the limit waits for the rest.
        (None, 4, [3, 1, 4, 0, 2]),
        (2, 9, [1, 4, 0, 2, 3]),
        (0, 9, [0, 1, 2, 3, 4]),
    ],
)
def test_oldest_first(max_behind: int | None, max_staleness: int, order: list[int]) -> None:
    chosen = OldestFirst.build(OldestFirst.Config(max_behind=max_behind))
    items = [item(9, 4), item(8), item(), item(6, 7), item(8, 9)]
    for num_groups in (0, 2, 5, 9):
        assert select(chosen, items, num_groups, max_staleness=max_staleness) == order[:num_groups]
