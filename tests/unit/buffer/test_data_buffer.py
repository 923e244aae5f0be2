from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.contracts.filter import BufferFilter, Versions
from slime_core.data.buffer import DataBuffer
from slime_core.data.plugin import PopFirst
from slime_core.errors import CheckpointError, DataError, PluginError
from slime_core.types import Prompt, Sample, Status, VersionSpan
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_sources.plugin import Files
from slime_sources.rendering.prompt_renderer import PromptRenderer


class Choose(BufferFilter):
    def __init__(self, *places: int) -> None:
        self.places = list(places)

    def select(self, items: Sequence[BufferItem], num_groups: int, versions: Versions) -> list[int]:
        self.versions = versions
        return self.places


@pytest.fixture
def make_buffer(tokenizer, jsonl):
    path = jsonl({"input": f"row{number}"} for number in range(5))

    def make(buffer_filter: BufferFilter | None = None, **options: Any) -> DataBuffer:
        source = Files.build(Files.Config(prompt_data=path, **options))(PromptRenderer(tokenizer), seed=0)
        return DataBuffer(source, buffer_filter or PopFirst.build(PopFirst.Config()))

    return make


def responses_to(prompt: Prompt, *versions: int) -> tuple[Sample, ...]:
    """One sample per version, response lengths 0, 1, 2, …"""
    return tuple(
        Sample(
            index=number,
            group_index=prompt.group_index,
            rollout_id=number,
            prompt=prompt,
            tokens=np.concatenate([prompt.token_ids, np.arange(number, dtype=np.int32)]),
            prompt_length=len(prompt.token_ids),
            loss_mask=np.ones(number, np.uint8),
            rollout_log_probs=np.full(number, -0.1, np.float32),
            spans=(VersionSpan(version, 0, number),) if number else (),
            status=Status.ABORTED,
        )
        for number, version in enumerate(versions)
    )


def partial(item: BufferItem, *versions: int) -> BufferItem:
    samples = responses_to(item.prompt, *versions)
    return BufferItem(prompt=item.prompt, kind=ItemKind.PARTIAL, samples=samples, added_step=4, start_rollout_id=2)


def names(items: Sequence[BufferItem]) -> list[str]:
    return [item.prompt.text for item in items]


def test_new_prompts_come_from_the_source(make_buffer):
    buffer = make_buffer()
    items = buffer.get_samples(3)
    assert names(items) == ["row0", "row1", "row2"]
    assert {(item.kind, item.samples, item.oldest_version) for item in items} == {(ItemKind.FRESH, (), None)}
    assert buffer.get_samples(0) == []
    assert names(buffer.get_samples(3)) == ["row3", "row4", "row0"]


def test_returned_groups_go_first(make_buffer):
    buffer = make_buffer()
    one, two, three = buffer.get_samples(3)
    buffer.add_samples([two.as_returned(1), partial(one, 7, 6, 5)])
    buffer.add_samples([three.as_returned(2)])
    assert len(buffer) == 3
    assert buffer.metrics == {
        "rollout/data/num_too_long": 0,
        "rollout/data/num_bad_rows": 0,
        "rollout/data/epoch": 0,
        "rollout/buffer/num_returned": 2,
        "rollout/buffer/num_partial": 1,
        "rollout/buffer/num_surplus": 0,
    }
    taken = buffer.get_samples(2)
    assert names(taken) == ["row1", "row0"]
    assert (taken[0].kind, taken[0].added_step) == (ItemKind.RETURNED, 1)
    # The first sample has no tokens, so its version 7 is not one of the item's.
    assert taken[1].oldest_version == 5
    assert names(buffer.get_samples(3)) == ["row2", "row3", "row4"]
    assert len(buffer) == 0


def test_the_filter_decides_which_and_in_which_order(make_buffer):
    buffer = make_buffer(Choose(2, 0))
    items = buffer.get_samples(4)
    buffer.add_samples([item.as_returned(0) for item in items])
    assert names(buffer.get_samples(3)) == ["row2", "row0", "row4"]
    assert names(buffer.items) == ["row1", "row3"]


@pytest.mark.parametrize("places", [(0, 0), (0, 1, 2), (3,), (-1,)])
def test_a_filter_that_breaks_the_contract(make_buffer, places: tuple[int, ...]):
    buffer = make_buffer(Choose(*places))
    buffer.add_samples([item.as_returned(0) for item in buffer.get_samples(3)])
    with pytest.raises(PluginError, match=r"Choose, select: returned .*; a list of at most 2 different positions"):
        buffer.get_samples(2)
    assert len(buffer) == 3


def test_items_must_match_their_kind(make_buffer):
    buffer = make_buffer()
    (item,) = buffer.get_samples(1)
    with pytest.raises(ValueError, match="a surplus item has at least one sample"):
        BufferItem(prompt=item.prompt, kind=ItemKind.SURPLUS)
    with pytest.raises(ValueError, match="a returned item has no samples"):
        BufferItem(prompt=item.prompt, kind=ItemKind.RETURNED, samples=responses_to(item.prompt, 0))
    with pytest.raises(ValueError, match=r"groups \[0\] are still marked fresh"):
        buffer.add_samples([item])


def test_a_restored_buffer_continues_as_the_saved_one(make_buffer, tmp_path: Path):
    def run(buffer: DataBuffer) -> list[tuple[Any, ...]]:
        return [
            (
                item.prompt.group_index,
                item.prompt.text,
                item.prompt.token_ids.tolist(),
                item.kind,
                item.added_step,
                item.start_rollout_id,
                item.oldest_version,
                [(s.tokens.tolist(), s.rollout_log_probs.tolist(), s.spans, s.status) for s in item.samples],
            )
            for item in buffer.get_samples(9)
        ]

    saved = make_buffer(rollout_shuffle=True)
    one, two, *_ = saved.get_samples(3)
    saved.add_samples([partial(two, 3, 3, 4), one.as_returned(5)])
    saved.save(tmp_path / "step")
    saved.save(tmp_path / "step")
    assert sorted(path.name for path in (tmp_path / "step").iterdir()) == ["buffer.json", "buffer.parquet"]

    restored = make_buffer(rollout_shuffle=True)
    restored.load(tmp_path / "step")
    expected = run(saved)
    assert run(restored) == expected
    assert [row[3] for row in expected[:3]] == [ItemKind.PARTIAL, ItemKind.RETURNED, ItemKind.FRESH]


def test_a_snapshot_undoes_later_changes(make_buffer):
    buffer = make_buffer(rollout_shuffle=True)
    buffer.add_samples([item.as_returned(0) for item in buffer.get_samples(2)])
    before = buffer.snapshot()
    taken = buffer.get_samples(6)
    buffer.add_samples([item.as_returned(1) for item in reversed(taken)])
    for _ in range(2):
        buffer.restore(before)
        again = buffer.get_samples(6)
        assert names(again) == names(taken)
        assert [item.prompt.group_index for item in again] == list(range(6))
        assert len(buffer) == 0


def test_an_empty_buffer_is_saved_too(make_buffer, tmp_path: Path):
    saved = make_buffer()
    saved.get_samples(4)
    saved.save(tmp_path)
    restored = make_buffer()
    restored.load(tmp_path)
    assert names(restored.get_samples(2)) == ["row4", "row0"]


def test_a_damaged_checkpoint(make_buffer, tmp_path: Path):
    buffer = make_buffer()
    with pytest.raises(CheckpointError, match=r"cannot be read from .*buffer.json"):
        buffer.load(tmp_path)
    buffer.add_samples([item.as_returned(0) for item in buffer.get_samples(2)])
    buffer.save(tmp_path)
    state = json.loads((tmp_path / "buffer.json").read_text())
    (tmp_path / "buffer.json").write_text(json.dumps({**state, "items": state["items"][:1]}))
    with pytest.raises(CheckpointError, match=r"buffer.parquet has 2 groups but buffer.json 1"):
        make_buffer().load(tmp_path)
    (tmp_path / "buffer.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(CheckpointError, match="version 99 and this slime reads 1"):
        make_buffer().load(tmp_path)
    (tmp_path / "buffer.json").write_text(json.dumps(state))
    (tmp_path / "buffer.parquet").write_bytes(b"")
    with pytest.raises(CheckpointError, match="the data buffer's checkpoint is damaged"):
        make_buffer().load(tmp_path)


def test_nothing_is_taken_if_the_source_raises(make_buffer, monkeypatch):
    buffer = make_buffer()
    buffer.add_samples(item.as_returned(0) for item in buffer.get_samples(2))
    waiting = buffer.items

    def bad_row(num_prompts):
        raise DataError("line 3")

    with monkeypatch.context() as patch:
        patch.setattr(buffer.source, "take", bad_row)
        with pytest.raises(DataError, match="line 3"):
            buffer.get_samples(3)
    assert buffer.items == waiting
    assert [item.prompt.group_index for item in buffer.get_samples(3)] == [0, 1, 2]
