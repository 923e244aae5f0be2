"""Files of JSON lines that are written while they are read."""

from __future__ import annotations

from pathlib import Path

from slime_viewer.line_file import LineFile


def test_a_line_without_its_end_is_left_for_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    file = LineFile(path)
    assert file.read_on() == (False, [])
    path.write_text('{"a": 1}\n{"a": ')
    assert file.read_on() == (False, [{"a": 1}])
    with path.open("a") as more:
        more.write("2}\n")
    assert file.read_on() == (False, [{"a": 2}])
    assert file.read_on() == (False, [])


def test_a_replaced_or_cut_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    file = LineFile(path)
    file.read_on()
    other = tmp_path / "other"
    other.write_text('{"a": 1}\n{"a": 3}\n')
    other.replace(path)
    assert file.read_on() == (True, [{"a": 1}, {"a": 3}])
    path.write_text('{"a": 4}\n')
    assert file.read_on() == (True, [{"a": 4}])
    path.unlink()
    assert file.read_on() == (True, [])


def test_lines_that_are_no_objects_are_named_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[3]\n{"a": 2}\n')
    file = LineFile(path)
    assert file.read_on() == (False, [{"a": 1}, {"a": 2}])
    assert file.problem == "lines.jsonl, line 2: no JSON object"
