"""Every file of the run folder: a disk that cannot be written is a StorageError that names the file and what to do, not a
traceback. `/dev/full` is a file on a full disk; a folder below a file cannot be made."""

import errno
import resource
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_core.contracts.tracker import RunInfo
from slime_core.controller.event_log import EventLog
from slime_core.controller.jsonl import JsonlTracker
from slime_core.controller.schedule import ScheduleFile
from slime_core.data.table import write_groups
from slime_core.errors import StorageError
from slime_core.rollout.trace import GroupTrace, ResponseTrace, RolloutTrace

EVENT = SimpleNamespace(run=SimpleNamespace(attempt=1), rollout_id=0, version=0, error=None, hook="run_start")


def log_metrics(path: Path) -> None:
    tracker = JsonlTracker()
    tracker._path, tracker._file = path, path.open("w")
    tracker.log("train/step", 0, {"train/loss": 1.0}, rollout_id=0)


def start_metrics(path: Path) -> None:
    JsonlTracker().start(RunInfo(name="a", run_dir=path.parent, config={}, attempt=1, resumed_at=None))


def add_schedule(path: Path) -> None:
    schedule = ScheduleFile.__new__(ScheduleFile)
    schedule._path = path
    schedule.checkpoint(1, {}, ())


def add_trace(path: Path) -> None:
    response = ResponseTrace(index=0, attempt=0, began=0.0, seconds=0.0, turns=())
    RolloutTrace(path).add(GroupTrace(scope="train", group_index=0, reward_s=0.0, responses=[response]))


WRITERS = {
    "metrics": log_metrics,
    "events": lambda path: EventLog(path).run_start(EVENT),
    "schedule": add_schedule,
    "traces": add_trace,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk(write, monkeypatch):
    with pytest.raises(
        StorageError, match=r"^/dev/full: no space left to write it .*What was saved before is untouched"
    ):
        write(Path("/dev/full"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO], ids=["read-only", "failing"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_disk_that_cannot_be_written(write, code, tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise OSError(code, "as asked", str(self))

    if write is log_metrics:
        monkeypatch.setattr(Path, "open", lambda path, *_: SimpleNamespace(write=lambda text: refuse(path)))
    else:
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StorageError, match=rf"^{tmp_path}/file: cannot be written: .*as asked.*--runs-dir"):
        write(tmp_path / "file")


def test_half_a_line_of_the_schedule_is_cut_off(tmp_path):
    """The disk is full in the middle of it, and has room for the checkpoint's a moment later."""
    schedule = ScheduleFile(tmp_path / "schedule.jsonl", {"a": 1}, resumed_at=None)
    events = {0: [(step, "submit", (f"train/0/{step}",), 0) for step in range(3000)]}
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(StorageError):
            schedule.add(events, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        signal.signal(signal.SIGXFSZ, handler)
    schedule.checkpoint(7, {}, [], broken="the disk was full")
    assert len((tmp_path / "schedule.jsonl").read_text().splitlines()) == 2
    ScheduleFile(tmp_path / "schedule.jsonl", {"a": 1}, resumed_at=7)


def test_folders_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (start_metrics, lambda path: write_groups(path, [])):
        with pytest.raises(StorageError, match=r"cannot be written: .*--runs-dir"):
            write(tmp_path / "file/below/metrics.jsonl")
