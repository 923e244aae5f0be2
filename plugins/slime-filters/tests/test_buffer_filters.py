from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from slime_core.buffer.item import BufferItem, ItemKind
from slime_core.errors import DataError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, VersionSpan
from slime_filters.plugin import FreshFirst, Priority

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


@pytest.mark.parametrize(
    ("num_groups", "order"), [(0, []), (1, [2]), (3, [2, 1, 4]), (5, [2, 1, 4, 0, 3]), (9, [2, 1, 4, 0, 3])]
)
def test_fresh_first(num_groups: int, order: list[int]) -> None:
    # The oldest versions are 1, 5, none, 0, 5; equal ones keep their order.
    items = [item(1, 9), item(5), item(), item(7, 0), item(6, 5)]
    assert FRESH_FIRST.select(items, num_groups) == order


def test_nothing_waits() -> None:
    assert FRESH_FIRST.select([], 4) == []
    assert Priority.build(Priority.Config()).select([], 4) == []


@pytest.mark.parametrize(("num_groups", "order"), [(0, []), (2, [1, 3]), (4, [1, 3, 2, 0])])
def test_priority(num_groups: int, order: list[int]) -> None:
    items = [item(metadata={"priority": value}) for value in (-1, 2.5, 0, 2.5)]
    assert Priority.build(Priority.Config()).select(items, num_groups) == order


def test_priority_under_another_key_with_a_default() -> None:
    chosen = Priority.build(Priority.Config(key="weight", default=1.0))
    items = [item(metadata={"weight": 0.5}), item(), item(metadata={"weight": 2, "priority": -9})]
    assert chosen.select(items, 3) == [2, 1, 0]


@pytest.mark.parametrize("value", [None, "high", True, float("nan")])
def test_unusable_priorities_name_the_prompt(value: object) -> None:
    with pytest.raises(DataError, match=r"metadata of train\.jsonl:4"):
        Priority.build(Priority.Config()).select([item(metadata={"priority": value})], 1)


def test_a_missing_priority_says_what_to_type() -> None:
    with pytest.raises(DataError, match=r"train\.jsonl:4 has no 'priority'.*rollout\.buffer_filter\.default"):
        Priority.build(Priority.Config()).select([item()], 1)
