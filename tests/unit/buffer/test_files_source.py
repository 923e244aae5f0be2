from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from slime_core.contracts.source import DataSource
from slime_core.errors import CheckpointError, DataError
from slime_sources.config import FilesConfig, StreamConfig
from slime_sources.plugin import Files
from slime_sources.rendering.prompt_renderer import PromptRenderer
from slime_sources.stream import StreamSource


@pytest.fixture
def source(tokenizer):
    def make(prompt_data: Any, *, seed: int = 0, max_prompt_len: int | None = None, **options: Any) -> DataSource:
        renderer = PromptRenderer(tokenizer, max_prompt_len=max_prompt_len)
        return Files.build(Files.Config(prompt_data=prompt_data, **options))(renderer, seed=seed)

    return make


def rows(count: int, prefix: str = "") -> list[dict[str, str]]:
    return [{"input": f"{prefix}{number}"} for number in range(count)]


def texts(source: DataSource, count: int) -> list[str]:
    return [prompt.text for prompt in source.take(count)]


def test_rows_in_order_with_endless_numbers(source, jsonl):
    drawn = source(jsonl(rows(3)))
    prompts = drawn.take(2) + drawn.take(0) + drawn.take(9)
    assert [prompt.text for prompt in prompts] == list("01201201201")
    assert [prompt.group_index for prompt in prompts] == list(range(11))
    assert prompts[4].origin.endswith("train.jsonl, line 2")
    assert drawn.num_rows == 3
    assert drawn.metrics["rollout/data/epoch"] == 3


def test_parquet_and_jsonl_give_the_same_prompts(source, jsonl, tmp_path: Path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows(20)), path, row_group_size=6)
    asked = {"rollout_shuffle": True, "seed": 5}
    assert texts(source(str(path), **asked), 50) == texts(source(jsonl(rows(20)), **asked), 50)


def test_shuffle_is_decided_by_the_seed_and_new_each_epoch(source, jsonl):
    path = jsonl(rows(30))
    drawn = texts(source(path, rollout_shuffle=True, seed=1), 90)
    epochs = [drawn[start : start + 30] for start in (0, 30, 60)]
    whole = [str(number) for number in range(30)]
    assert all(sorted(epoch, key=int) == whole for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, whole]}) == 4
    assert texts(source(path, rollout_shuffle=True, seed=1), 90) == drawn
    # seed + epoch, as slime has it
    assert texts(source(path, rollout_shuffle=True, seed=2), 30) == epochs[1]
    assert texts(source(path, rollout_shuffle=True, seed=-1), 30) != whole


def test_the_order_does_not_change_from_release_to_release(source, jsonl):
    # A run resumed under another numpy or slime must draw the same rows.
    assert texts(source(jsonl(rows(10)), rollout_shuffle=True, seed=42), 10) == list("1495876203")


def test_no_global_random_state_is_used(source, jsonl):
    import random

    import numpy as np

    before = random.getstate(), np.random.get_state()[1].tolist()
    texts(source(jsonl(rows(30)), rollout_shuffle=True), 40)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("weights", [None, (3, 1)])
def test_restore_at_every_position_continues_with_the_same_draws(source, jsonl, streaming, shuffle, weights):
    first = jsonl([*rows(5, "a"), "broken", {"input": "much too long"}], "a.jsonl")
    second = jsonl(rows(3, "b"), "b.jsonl")
    entries = (
        [first, second]
        if weights is None
        else [{"path": p, "weight": w} for p, w in zip((first, second), weights, strict=True)]
    )

    def make() -> DataSource:
        return source(
            entries, seed=3, max_prompt_len=4, rollout_shuffle=shuffle, on_bad_row="skip", streaming=streaming
        )

    whole = make()
    drawn = whole.take(25)
    for position in range(25):
        before = make()
        before.take(position)
        after = make()
        after.restore(json.loads(json.dumps(before.state())))
        rest = after.take(25 - position)
        assert [(p.text, p.group_index) for p in rest] == [(p.text, p.group_index) for p in drawn[position:]]
        assert after.metrics == whole.metrics
        assert after.state() == whole.state()


def test_checking_at_the_start_does_not_change_the_draws(source, jsonl):
    path = jsonl([*rows(20), {"input": "far too long"}, "broken", {"prompt": "no input"}, *rows(20, "x")])
    asked = {"max_prompt_len": 4, "on_bad_row": "skip", "rollout_shuffle": True}
    eager = source(path, streaming=False, **asked)
    lazy = source(path, streaming=True, **asked)
    assert eager.num_rows == 40
    assert lazy.num_rows is None
    assert texts(eager, 100) == texts(lazy, 100)
    assert eager.metrics == {"rollout/data/num_too_long": 1, "rollout/data/num_bad_rows": 2, "rollout/data/epoch": 2}
    # Once in each of the two whole epochs, and perhaps in the third.
    assert 4 <= lazy.metrics["rollout/data/num_bad_rows"] <= 6


def test_small_files_are_checked_at_the_start_and_large_ones_are_not(source, jsonl, monkeypatch):
    path = jsonl([*rows(5), {"no": "input"}])
    with pytest.raises(DataError, match=r'line 6: no key "input"'):
        source(path)
    monkeypatch.setattr("slime_sources.files.EAGER_ROWS", 5)
    drawn = source(path)
    assert texts(drawn, 5) == list("01234")
    with pytest.raises(DataError, match=r'line 6: no key "input"'):
        drawn.take(1)


def test_num_rows_without_a_check_is_known_when_no_row_can_be_passed_over(source, jsonl):
    path = jsonl(rows(5))
    assert source(path, streaming=True).num_rows == 5
    assert source(path, streaming=True, max_prompt_len=3).num_rows is None
    assert source(path, streaming=True, on_bad_row="skip").num_rows is None
    assert source(f"{path}@[1:-1]", max_prompt_len=3).num_rows == 3


def test_the_error_of_a_broken_line_has_the_flag_to_continue(source, jsonl):
    path = jsonl([{"input": "a"}, '{"input": "b"'])
    with pytest.raises(DataError, match=r"train.jsonl, line 2: not valid JSON .* --on-bad-row skip"):
        source(path)
    assert texts(source(path, on_bad_row="skip"), 3) == list("aaa")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 200_000, "lists and objects are nested more than 100 deep: found '\\[\\[\\["),
        ('{"input": "b", "metadata": {"x": ' + "[" * 100 + "]" * 100 + "}}", "nested more than 100 deep"),
        ('{"input": "b", "label": "1", "input": "c"}', 'key "input" occurs twice in one object'),
        ('{"input": "b", "metadata": {"x": 1, "x": 2}}', 'key "x" occurs twice in one object'),
        ('{"input": "b\x00"}', "Invalid control character"),
        ('{"input": "b\\ud800"}', "the prompt is not valid Unicode"),
        ('["b"]', "a row is a JSON object"),
        ("3", "a row is a JSON object"),
    ],
)
def test_a_bad_row_is_named_or_skipped(source, tokenizer, jsonl, line, message):
    path = jsonl([{"input": "a"}, line])
    with pytest.raises(DataError, match=f"train.jsonl, line 2: .*{message}.*--on-bad-row skip"):
        source(path)
    skipping = source(path, on_bad_row="skip")
    assert texts(skipping, 2) == ["a", "a"]
    assert skipping.metrics["rollout/data/num_bad_rows"] == 1
    streaming = StreamSource(StreamConfig(prompt_data=(path,), on_bad_row="skip"), PromptRenderer(tokenizer), seed=0)
    assert texts(streaming, 2) == ["a", "a"]


def test_brackets_in_text_are_no_nesting(source, jsonl):
    row = {"input": "a", "metadata": {"x": "[" * 5000, "y": [{}] * 200}}
    assert source(jsonl([row])).take(1)[0].metadata == row["metadata"]


def test_a_byte_order_mark_is_no_part_of_the_first_row(source, tmp_path: Path):
    (tmp_path / "marked.jsonl").write_text('{"input": "a"}\n', encoding="utf-8-sig")
    assert texts(source(str(tmp_path / "marked.jsonl")), 1) == ["a"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_no_file_of_rows_is_named(source, tokenizer, tmp_path: Path, is_stream):
    def stream(path: str) -> DataSource:
        return StreamSource(StreamConfig(prompt_data=(path,)), PromptRenderer(tokenizer), seed=0)

    opened = stream if is_stream else source
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    (tmp_path / "folder.jsonl").mkdir()
    for name, message in {
        "pipe.jsonl": "pipe.jsonl is a pipe or a device. Rows are read more than once; write them to a file",
        "device.jsonl": "device.jsonl is a pipe or a device",
        "folder.jsonl": "folder.jsonl is a folder; it holds no .jsonl or .parquet file",
        f"{'x' * 300}.jsonl": "not the name of a file: File name too long",
        "nothing.jsonl": "there is no file",
    }.items():
        path = str(tmp_path / name)
        with pytest.raises(DataError, match=message):
            opened(path)


def test_a_damaged_parquet_file_is_named(source, tmp_path: Path):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows(500, "ab")), path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    damaged = {
        "cannot be read as Parquet": [whole[: len(whole) // 2], b"PAR1" + b"x" * 50 + b"PAR1", b'{"input": "a"}\n'],
        "train.parquet, row 0: it cannot be decoded": [
            whole[:20] + b"\xff" * 400 + whole[420:],
            whole.replace(b"ab0", b"a\xff0"),
        ],
    }
    for message, contents in damaged.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(DataError, match=message):
                source(str(path))
    pq.write_table(pa.table([pa.array(["1"]), pa.array(["2"])], names=["input", "input"]), path)
    with pytest.raises(DataError, match="it has several columns with the name input"):
        source(str(path))


@pytest.mark.parametrize("streaming", [True, False])
def test_no_row_can_be_used(source, jsonl, streaming):
    long = jsonl([{"input": "12345"}, {"input": "1234567"}], "long.jsonl")
    message = (
        "none of the 2 rows of .*long.jsonl can be used: the shortest prompt has 5 tokens and .*max_prompt_len is 4"
    )
    with pytest.raises(DataError, match=message):
        source(long, max_prompt_len=4, streaming=streaming).take(1)
    bad = jsonl(["broken", {"input": ""}], "bad.jsonl")
    with pytest.raises(
        DataError, match=r"none of the 2 rows .* the first bad row: .*bad.jsonl, line 1: not valid JSON"
    ):
        source(bad, on_bad_row="skip", streaming=streaming).take(1)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_weighted_file_without_usable_rows_is_an_error(source, jsonl, streaming):
    entries = [
        {"path": jsonl(rows(5), "good.jsonl"), "weight": 0.5},
        {"path": jsonl([{"input": "12345"}], "long.jsonl"), "weight": 0.5},
    ]
    with pytest.raises(DataError, match=r"none of the 1 rows of .*long.jsonl"):
        source(entries, max_prompt_len=4, streaming=streaming).take(50)


def test_weights_are_shares_of_the_draws(source, jsonl):
    entries = [
        {"path": jsonl(rows(7, "a"), "a.jsonl"), "weight": 6},
        {"path": jsonl(rows(50, "b"), "b.jsonl"), "weight": 3},
        {"path": jsonl(rows(2, "c"), "c.jsonl"), "weight": 1},
    ]
    drawn = source(entries, seed=11, rollout_shuffle=True)
    assert drawn.num_rows == 59
    names = texts(drawn, 3000)
    counts = Counter(name[0] for name in names)
    # Four standard deviations of a binomial: sqrt(3000 * 0.6 * 0.4) = 27.
    assert abs(counts["a"] - 1800) < 108
    assert abs(counts["b"] - 900) < 101
    assert abs(counts["c"] - 300) < 66
    # Each file goes through its own epochs, and the files are mixed, not in turn.
    of_a = [name for name in names if name[0] == "a"]
    assert all(len(set(of_a[start : start + 7])) == 7 for start in range(0, len(of_a) - 6, 7))
    assert len(set(itertools.pairwise(names))) > 300
    assert texts(source(entries, seed=12, rollout_shuffle=True), 3000) != names


def test_restore_refuses_other_data_options_and_seeds(source, jsonl, tmp_path: Path):
    path = jsonl(rows(5))
    state = source(path).state()
    (tmp_path / "moved").mkdir()
    moved = shutil.copy(path, tmp_path / "moved")
    source(moved).restore(state)
    source(path, streaming=True).restore(state)
    # The error message recommends this flag.
    source(path, on_bad_row="skip").restore(state)
    for other in (source(path, rollout_shuffle=True), source(f"{path}@[:4]")):
        with pytest.raises(CheckpointError, match=r"the fingerprint was .* Set them back, or start a new run"):
            other.restore(state)
    with pytest.raises(CheckpointError, match="the seed was 0 when the checkpoint was written and is 1 now"):
        source(path, seed=1).restore(state)
    Path(path).write_text(Path(path).read_text().replace("4", "5"))
    with pytest.raises(CheckpointError, match="fingerprint"):
        source(path).restore(state)


def test_a_bad_row_keeps_the_position_and_can_be_skipped_from_there(source, tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"input": "0"}\n{"input": "1"}\n{"inp\n{"input": "3"}\n')
    drawn = source(str(path), streaming=True)
    assert texts(drawn, 1) == ["0"]
    before = drawn.state()
    with pytest.raises(DataError, match=r"line 3.*--on-bad-row skip"):
        drawn.take(2)
    assert drawn.state() == before
    resumed = source(str(path), streaming=True, on_bad_row="skip")
    resumed.restore(before)
    assert [(prompt.text, prompt.group_index) for prompt in resumed.take(2)] == [("1", 1), ("3", 2)]


def test_what_the_config_accepts(tmp_path: Path):
    config = FilesConfig.model_validate({"prompt_data": "a.jsonl@[:5]"}, context={"base": tmp_path})
    assert [entry.path for entry in config.prompt_data] == [f"{tmp_path}/a.jsonl@[:5]"]
    assert FilesConfig.model_validate_json(config.model_dump_json()) == config
    entries = [{"path": "a.jsonl", "weight": 2}, {"path": "b.jsonl", "weight": 1.5}]
    assert [entry.weight for entry in FilesConfig(prompt_data=entries).prompt_data] == [2, 1.5]
    for wrong, message in [
        ([], "at least 1 item"),
        ("a.jsonl@[0:1:2]", "no step"),
        ([entries[0], "b.jsonl"], "set weight for all entries, or for none. Without one: b.jsonl"),
        ([{"path": "a.jsonl", "weight": 0}], "greater than 0"),
        ([{"path": "a.jsonl", "share": 1}], "Extra inputs"),
    ]:
        with pytest.raises(ValidationError, match=message):
            FilesConfig(prompt_data=wrong)
    assert all(field.description for field in FilesConfig.model_fields.values())


def test_the_drivers_import_nothing_heavy():
    code = (
        "import sys, slime_core.data.plugin; "
        "print(sorted({'numpy', 'pyarrow', 'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
