from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from slime_core.errors import DataError
from slime_sources.data_path import DataPath
from slime_sources.rows import JsonlFile, ParquetFile, RowRanges


def open_rows(*paths: object) -> RowRanges:
    return RowRanges.open([DataPath.parse(str(path)) for path in paths])


def contents(rows: RowRanges) -> list[object]:
    return [rows.read(row)["n"] for row in range(len(rows))]


@pytest.mark.parametrize("ends", ["2:5", ":3", "7:", "-3:", ":-8", "-5:-2", ":", "0:10000", " 1 : 2 "])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_range_is_what_python_slicing_gives(tmp_path: Path, kind: str, ends: str):
    rows = [{"n": n} for n in range(10)]
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    start, stop = (int(end) if end.strip() else None for end in ends.split(":"))
    assert contents(open_rows(f"{path}@[{ends}]")) == list(range(10))[start:stop]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl@[3]", "two ends with a colon"),
        ("a.jsonl@[]", "two ends with a colon"),
        ("a.jsonl@[0:10:2]", "no step"),
        ("a.jsonl@[0:ten]", '"ten" is not a row number'),
        ("a.jsonl@[1.5:]", '"1.5" is not a row number'),
        ("@[0:1]", "no file name"),
        ("", "no file name"),
    ],
)
def test_a_wrong_range_is_an_error(text: str, message: str):
    with pytest.raises(DataError, match=message) as caught:
        DataPath.parse(text)
    assert f'"{text}"' in str(caught.value)


def test_a_data_path_prints_as_it_was_typed():
    for text in ("a.jsonl", "b@c.parquet@[1:]", "a.jsonl@[:-2]", "a.jsonl@[0:0]"):
        assert str(DataPath.parse(text)) == text


def test_files_follow_each_other(jsonl):
    first = jsonl([{"n": 0}, {"n": 1}], "first.jsonl")
    second = jsonl([{"n": 2}, {"n": 3}, {"n": 4}], "second.jsonl")
    rows = open_rows(first, f"{second}@[1:]", first)
    assert contents(rows) == [0, 1, 3, 4, 0, 1]
    assert rows.origin(2) == f"{second}, line 2"
    assert rows.origin(5) == f"{first}, line 2"


def test_line_ends_empty_lines_and_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": "\xc3\xa9"}\r\n\r\n\n{"n": 1}\n  {"n": 2}  \r\n\n{"n": 3}')
    rows = open_rows(path)
    assert contents(rows) == ["é", 1, 2, 3]
    assert [rows.origin(row) for row in range(4)] == [f"{path}, line {line}" for line in (1, 4, 5, 7)]


def test_lines_across_the_chunks_of_the_scan(monkeypatch, jsonl):
    monkeypatch.setattr("slime_sources.rows.CHUNK_BYTES", 7)
    path = jsonl([{"n": "x" * length} for length in range(40)])
    rows = open_rows(path)
    assert contents(rows) == ["x" * length for length in range(40)]
    assert JsonlFile(Path(path)).content_hash == xxhash.xxh3_128_hexdigest(Path(path).read_bytes())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"n": 1', r"line 2: not valid JSON \(Expecting ',' delimiter.*found '\{\"n\": 1'"),
        ('{"n": NaN}', "line 2: not valid JSON .NaN is not JSON"),
        ("[1, 2]", r"line 2: a row is a JSON object, found '\[1, 2\]'"),
        ("   ", "line 2: not valid JSON"),
        ("[" + "1, " * 500, "…'"),
    ],
)
def test_a_broken_line_is_named_and_shown(jsonl, line: str, message: str):
    rows = open_rows(jsonl([{"n": 0}, line, {"n": 2}]))
    assert rows.read(2) == {"n": 2}
    with pytest.raises(DataError, match=message) as caught:
        rows.read(1)
    assert len(str(caught.value)) < 500


def test_bytes_that_are_not_utf8(tmp_path: Path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"n": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl, line 1: not valid JSON \('utf-8' codec"):
        open_rows(path).read(0)


def test_paths_that_give_no_rows(tmp_path: Path, jsonl):
    path = jsonl([{"n": 0}])
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("n\n0\n")
    (tmp_path / "noise.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n\n")
    for asked, message in [
        (tmp_path, "is a folder; name the files in it: blank.jsonl, empty.jsonl"),
        (tmp_path / "hollow", "it holds no .jsonl or .parquet file"),
        (tmp_path / "trian.jsonl", "there is no file .*trian.jsonl; close match: train.jsonl"),
        (tmp_path / "away" / "x.jsonl", "there is no file .*; looked from"),
        (tmp_path / "empty.jsonl", "the file is empty"),
        (tmp_path / "blank.jsonl", "no rows are left; the file has 0"),
        (tmp_path / "table.csv", "ends in .csv; .jsonl and .parquet can be read"),
        (tmp_path / "noise.parquet", "noise.parquet: cannot be read as Parquet"),
        (f"{path}@[1:]", "no rows are left; the file has 1"),
    ]:
        with pytest.raises(DataError, match=message):
            open_rows(asked)


def test_parquet_rows_lack_what_the_writer_did_not_give(tmp_path: Path):
    path = tmp_path / "data.parquet"
    given = [
        {"n": 0, "messages": [{"role": "user", "content": "a"}], "label": None},
        {"n": 1, "messages": [{"role": "tool", "content": "b", "name": "search"}], "label": "x"},
    ]
    pq.write_table(pa.Table.from_pylist(given), path)
    rows = open_rows(path)
    assert [rows.read(row) for row in range(2)] == given
    assert rows.origin(1) == f"{path}, row 1"


def test_parquet_keeps_few_row_groups(tmp_path: Path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"n": list(range(100))}), path, row_group_size=10)
    file = ParquetFile(path, cache_bytes=200)
    assert [file.read(row)["n"] for row in (0, 99, 55, 10, 9, 0)] == [0, 99, 55, 10, 9, 0]
    assert list(file._cache) == [1, 0]


def test_200_000_lines_do_not_become_python_objects(tmp_path: Path):
    path = tmp_path / "big.jsonl"
    with path.open("w") as file:
        file.writelines(f'{{"n": {n}, "text": "{"some words " * 10}"}}\n' for n in range(200_000))
    tracemalloc.start()
    rows = open_rows(path)
    seen = sum(rows.read(row)["n"] for row in range(0, 200_000, 97))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 200_000
    assert seen == sum(range(0, 200_000, 97))
    # 27 MB of text; the index is 1.6 MB, and the scan looks at 4 MiB at a time.
    assert peak < 15e6
