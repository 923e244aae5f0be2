from __future__ import annotations

import math
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.atomic_io.json_text import json_text
from slime_core.data.table import groups_to_table, read_groups, table_to_groups, write_groups, write_table
from slime_core.errors import DataError, StorageError
from slime_core.types import Image, Prompt, Sample, SampleGroup, SpanReward, Status, VersionSpan

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(st.text(max_size=4), JSON, max_size=2)


def vector(dtype: Any, element: st.SearchStrategy[int], length: int) -> st.SearchStrategy[Any]:
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return st.lists(element, min_size=length, max_size=length).map(lambda values: np.array(values, bits).view(dtype))


@st.composite
def prompts(draw: st.DrawFn, group_index: int) -> Prompt:
    images = st.lists(st.builds(Image, data=st.binary(max_size=3), name=TEXT), max_size=2).map(tuple)
    return Prompt(
        group_index=group_index,
        text=draw(TEXT),
        token_ids=draw(vector(np.int32, st.integers(0, 2**31 - 1), draw(st.integers(1, 3)))),
        label=draw(JSON),
        messages=draw(st.none() | st.lists(OBJECT, max_size=2)),
        tools=draw(st.none() | st.lists(OBJECT, max_size=1)),
        metadata=draw(OBJECT),
        images=draw(images),
        origin=draw(TEXT),
    )


@st.composite
def samples(draw: st.DrawFn, prompt: Prompt) -> Sample:
    length = draw(st.integers(0, 3))
    return Sample(
        index=draw(INT64),
        group_index=prompt.group_index,
        rollout_id=draw(INT64),
        prompt=prompt,
        tokens=np.concatenate([prompt.token_ids, draw(vector(np.int32, st.integers(0, 2**31 - 1), length))]),
        prompt_length=len(prompt.token_ids),
        loss_mask=draw(vector(np.uint8, st.integers(0, 1), length)),
        # Any 32 bits: NaNs of every kind, -0.0, subnormals.
        rollout_log_probs=draw(vector(np.float32, st.integers(0, 2**32 - 1), length)),
        response=draw(TEXT),
        raw_response=draw(TEXT),
        spans=tuple(
            VersionSpan(*span)
            for span in draw(st.lists(st.tuples(st.integers(0, 2**40), st.just(0), st.just(length)), max_size=2))
        ),
        span_rewards=tuple(SpanReward(0, length, value) for value in draw(st.lists(st.floats(), max_size=2))),
        status=draw(st.sampled_from(Status)),
        reward=draw(st.none() | st.floats()),
        reward_parts=draw(st.dictionaries(TEXT, st.floats(), max_size=2)),
        credit_key=draw(st.none() | INT64),
        remove_sample=draw(st.booleans()),
        metadata=draw(OBJECT),
        counts=draw(st.dictionaries(TEXT, st.floats(), max_size=2)),
    )


@st.composite
def groups(draw: st.DrawFn) -> SampleGroup:
    own = draw(prompts(draw(INT64)))
    other = draw(prompts(own.group_index))
    members = draw(st.lists(samples(own) | samples(other), max_size=3))
    return SampleGroup(prompt=own, samples=tuple(members))


def image(value: Any) -> Any:
    """Nested tuples in which equal means equal in type and bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, Prompt | Sample | SampleGroup):
        return type(value), tuple((f.name, image(getattr(value, f.name))) for f in fields(value))
    if isinstance(value, dict):
        return dict, tuple((key, image(child)) for key, child in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(image(child) for child in value)
    return type(value), value


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(groups(), max_size=3))
def test_every_bit_comes_back(tmp_path_factory: pytest.TempPathFactory, written: list[SampleGroup]):
    path = tmp_path_factory.mktemp("table") / "groups.parquet"
    write_groups(path, written)
    assert image(read_groups(path)) == image(written)
    assert image(table_to_groups(groups_to_table(written))) == image(written)


def make_group(group_index: int = 3, lengths: tuple[int, ...] = (2, 0, 3)) -> SampleGroup:
    prompt = Prompt(
        group_index=group_index,
        text="hi",
        token_ids=np.array([5, 6], np.int32),
        label="北京",
        metadata={"level": 1},
        origin="train.jsonl, line 4",
    )
    members = [
        Sample(
            index=10 + number,
            group_index=group_index,
            rollout_id=10 + number,
            prompt=prompt,
            tokens=np.array([5, 6, *range(100, 100 + length)], np.int32),
            prompt_length=2,
            loss_mask=np.ones(length, np.uint8),
            rollout_log_probs=np.full(length, -0.5, np.float32),
            response="ab"[:length],
            spans=(VersionSpan(4, 0, length),) if length else (),
            span_rewards=(SpanReward(1, length, 0.25),) if length else (),
            reward=1.0,
            reward_parts={"format": 0.5},
            counts={"turns": 2.0},
        )
        for number, length in enumerate(lengths)
    ]
    return SampleGroup(prompt=prompt, samples=tuple(members))


def test_the_columns_that_readers_see(tmp_path: Path):
    path = tmp_path / "rollouts" / "step_0.parquet"
    write_groups(path, [make_group()])
    table = pq.read_table(path)
    assert table.num_rows == 3
    row = table.slice(2, 1).to_pylist()[0]
    assert row == {
        "group": 0,
        "group_index": 3,
        "index": 12,
        "rollout_id": 12,
        "credit_key": None,
        "status": "completed",
        "reward": 1.0,
        "reward_parts": [("format", 0.5)],
        "remove_sample": False,
        "prompt": "hi",
        "response": "ab",
        "raw_response": None,
        "label": '"北京"',
        "messages": None,
        "tools": None,
        "prompt_metadata": '{"level": 1}',
        "metadata": "{}",
        "counts": [("turns", 2.0)],
        "origin": "train.jsonl, line 4",
        "images": None,
        "prompt_token_ids": [5, 6],
        "prompt_length": 2,
        "tokens": [5, 6, 100, 101, 102],
        "loss_mask": [1, 1, 1],
        "rollout_log_probs": [-0.5, -0.5, -0.5],
        "spans": [{"version": 4, "start": 0, "end": 3}],
        "span_rewards": [{"start": 1, "end": 3, "value": 0.25}],
    }
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_slime_0_2_has_one_text():
    table = groups_to_table([make_group(3)])
    (group,) = table_to_groups(table.drop_columns(["raw_response"]))
    assert [(s.response, s.raw_response) for s in group.samples] == [
        (s.response, s.response) for s in make_group(3).samples
    ]


def test_samples_of_a_group_share_their_prompt_and_own_their_memory(tmp_path: Path):
    write_groups(tmp_path / "x.parquet", [make_group(3), make_group(4)])
    first, second = read_groups(tmp_path / "x.parquet")
    assert all(sample.prompt is first.prompt for sample in first.samples)
    assert second.prompt is not first.prompt
    first.samples[0].tokens[:] = 0
    assert first.samples[2].tokens.tolist() == [5, 6, 100, 101, 102]


def test_a_chunked_table_with_more_columns(tmp_path: Path):
    whole = groups_to_table([make_group(3), make_group(4, (1,)), make_group(5, ())])
    whole = whole.append_column("advantage", pa.array(range(whole.num_rows)))
    write_table(tmp_path / "x.parquet", whole)
    chunked = pa.concat_tables([whole.slice(0, 2), whole.slice(2, 1), whole.slice(3)])
    expected = image([make_group(3), make_group(4, (1,)), make_group(5, ())])
    assert image(table_to_groups(chunked)) == expected
    assert image(read_groups(tmp_path / "x.parquet")) == expected


def test_what_json_cannot_hold_is_named():
    group = make_group()
    broken = replace(group.samples[1], metadata={"turns": [{"at": 1}, {"at": np.float32(2)}]})
    with pytest.raises(DataError, match=r"sample 11: the metadata\['turns'\]\[1\]\['at'\] is of type float32"):
        groups_to_table([replace(group, samples=(group.samples[0], broken))])
    for label, message in [({1, 2}, "type set"), (math.inf, "is inf"), ({"a": b""}, r"\['a'\] is of type bytes")]:
        prompt = replace(group.prompt, label=label)
        with pytest.raises(DataError, match=f"train.jsonl, line 4: the label.*{message}"):
            groups_to_table([SampleGroup(prompt=prompt, samples=())])
    around: list[Any] = []
    around.append(around)
    with pytest.raises(DataError, match="cannot hold"):
        json_text(around, "x")


def test_a_sample_in_the_wrong_group():
    group = make_group()
    stray = replace(group.samples[0], group_index=9)
    with pytest.raises(DataError, match=r"sample 10 has group_index 9 .* but it is in group 3"):
        groups_to_table([replace(group, samples=(stray,))])


def test_wrong_dtypes_do_not_pass():
    group = make_group()
    wide = replace(group.samples[0], tokens=group.samples[0].tokens.astype(np.int64))
    with pytest.raises(AssertionError, match="expected int32 vectors, found int64"):
        groups_to_table([replace(group, samples=(wide,))])


def test_files_that_are_not_dumps(tmp_path: Path):
    path = tmp_path / "x.parquet"
    with pytest.raises(DataError, match=r"x.parquet cannot be read as Parquet"):
        read_groups(path)
    write_groups(path, [make_group()])
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"x.parquet cannot be read as Parquet"):
        read_groups(path)
    pq.write_table(groups_to_table([make_group()]).drop_columns(["tokens", "spans"]), path)
    with pytest.raises(DataError, match=r"x.parquet: not a table of sample groups: it lacks tokens, spans"):
        read_groups(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "x.parquet"
    write_groups(path, [make_group(3)])

    def disk_full(table: pa.Table, where: Path, **options: Any) -> None:
        Path(where).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("slime_core.data.table.pq.write_table", disk_full)
    with pytest.raises(StorageError, match=r"x.parquet: no space left"):
        write_groups(path, [make_group(4)])
    assert list(tmp_path.iterdir()) == [path]
    assert read_groups(path)[0].group_index == 3
