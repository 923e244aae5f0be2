"""What a run records for the page, and what happens if it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from written_runs import make_groups

import slime_viewer.plan_recording
import slime_viewer.recording
from slime_core.algorithm.build_batch import build_batch
from slime_core.data.table import dump_file, dumped_steps, read_groups
from slime_core.types.batch import TokenColumns
from slime_viewer.plan_recording import PlanRecording
from slime_viewer.recording import Recording, first_to_go, thin_out
from slime_viewer.sample_numbers import read_columns


def test_groups_and_tokens_come_back(tmp_path: Path) -> None:
    groups = make_groups(4, [["one", "two"], ["three"]])
    batch = build_batch(groups)
    advantages = np.linspace(-1, 1, len(batch.mask), dtype=np.float32)
    recording = Recording(tmp_path, attempt=2)
    recording.do(lambda: recording.write_groups(4, groups))
    recording.do(lambda: recording.write_tokens(4, batch, TokenColumns(advantages=advantages)))
    recording.do(lambda: recording.write_line({"lane": "trainer"}))
    recording.end()
    assert [s.response for g in read_groups(dump_file(tmp_path / "view/groups", 4)) for s in g.samples] == [
        "one",
        "two",
        "three",
    ]
    table = read_columns(dump_file(tmp_path / "view/tokens", 4))
    assert table["index"].to_pylist() == [400, 401, 402]
    np.testing.assert_array_equal(table["advantages"].combine_chunks().flatten(), advantages)
    assert json.loads((tmp_path / "view/times.jsonl").read_text()) == {"lane": "trainer", "attempt": 2}


def test_a_folder_that_cannot_be_written_ends_the_recording_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "view").write_text("a file where a folder would be")
    recording = Recording(tmp_path, attempt=1)
    for step in range(3):
        recording.do(lambda step=step: recording.write_groups(step, make_groups(step, [["a"]])))
    recording.end()
    error = capsys.readouterr().err
    assert error.startswith("slime-viewer records nothing more of this run for `slime view`: ")
    assert error.count("\n") == 1


def test_the_size_is_bounded_and_old_steps_become_sparse(tmp_path: Path) -> None:
    for step in range(200):
        dump_file(tmp_path, step).write_bytes(b"x" * 100)
        thin_out([tmp_path], most_bytes=2000)
    kept = dumped_steps(tmp_path)
    assert len(kept) == 20
    assert (kept[0], kept[-1]) == (0, 199)
    gaps = np.diff(kept)
    assert gaps[-1] == 1
    assert gaps[:5].mean() > 4 * gaps[-5:].mean()


def test_writing_takes_a_hundredth_of_the_runs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 3 s were spent, of which 2 s are free; so the next step is written after 100 s. Tokens follow the groups."""
    now = 0.0
    monkeypatch.setattr(slime_viewer.recording.time, "monotonic", lambda: now)
    recording = Recording(tmp_path, attempt=1)
    assert recording.takes(0)
    recording._spent = 3.0
    now = 99.0
    assert not recording.takes(1)
    assert recording.takes(0)
    now = 101.0
    assert recording.takes(2)
    assert not recording.takes(1)
    recording.end()


def test_the_plan_of_a_long_run_is_there_without_being_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by `slime plan` in a process of its own, once; a config that cannot be planned leaves nothing."""
    (tmp_path / "config.toml").write_text('name = "x"\nmodel.nonsense = 1\n')
    monkeypatch.setattr(slime_viewer.plan_recording, "GPUS", tmp_path)
    of_an_unknown_gpu = PlanRecording(tmp_path, after_s=0.0)
    of_an_unknown_gpu.advance(None)
    assert not of_an_unknown_gpu.is_counting
    plan = PlanRecording(tmp_path, after_s=1e6)
    plan.advance(None)
    assert not plan.is_counting
    failing = PlanRecording(tmp_path, after_s=0.0)
    failing.advance(80 * 2**30)
    assert failing.is_counting
    failing.wait()
    failing.advance(None)
    assert list((tmp_path / "view").iterdir()) == []
    failing.advance(None)
    assert not failing.is_counting


def test_slow_programs_that_measure_memory_are_asked_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: one that takes 1 s is asked every 100 s, one that takes no time every 5 s."""
    now, asked = 0.0, []

    def slow() -> dict[str, tuple[int, int]]:
        nonlocal now
        asked.append(now)
        now += 1.0
        return {"host": (1, 2)}

    monkeypatch.setattr(slime_viewer.recording.time, "monotonic", lambda: now)
    monkeypatch.setattr(slime_viewer.recording, "memory_in_use", slow)
    recording = Recording(tmp_path, attempt=1)
    for instant in (0.0, 50.0, 99.0, 101.0):
        now = instant
        recording.write_memory()
    recording.end()
    assert asked == [0.0, 101.0]


def test_the_newest_step_stays(tmp_path: Path) -> None:
    assert first_to_go([3, 9]) == 3
    for step in range(3):
        dump_file(tmp_path, step).write_bytes(b"x" * 100)
    thin_out([tmp_path], most_bytes=10)
    assert dumped_steps(tmp_path) == [2]
