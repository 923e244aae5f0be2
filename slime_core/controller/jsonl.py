"""metrics.jsonl: {"axis", "step", "rollout_id", "attempt", "metrics"} a line, whole lines only, cut at a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

from slime_core.algorithm.metrics import EVAL_AXIS
from slime_core.atomic_io.atomic_file import write_text
from slime_core.atomic_io.storage import written
from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.controller.run_folder import damaged

FILE: Final = "metrics.jsonl"


class JsonlTracker(Tracker):
    """Appends; each line is flushed, so that a killed run keeps what it has logged."""

    def __init__(self) -> None:
        self._path = Path(FILE)
        self._file: IO[str] | None = None
        self._attempt = 1

    def start(self, run: RunInfo) -> None:
        self._path = path = run.run_dir / FILE
        self._attempt = run.attempt
        kept = list(kept_lines(path, run.resumed_at)) if run.resumed_at is not None and path.exists() else []
        write_text(path, "".join(kept))
        with written(path):
            self._file = path.open("a", encoding="utf-8")

    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        assert self._file is not None, "start() comes first"
        line = {
            "axis": axis,
            "step": step,
            "rollout_id": rollout_id,
            "attempt": self._attempt,
            "metrics": dict(metrics),
        }
        with written(self._path):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def finish(self) -> None:
        if self._file is not None:
            with written(self._path):
                self._file.close()


def kept_lines(path: Path, resumed_at: int) -> Iterator[str]:
    """The lines from before the checkpoint. An evaluation follows its step's checkpoint, so the last one is done again;
    the end of a line that was being written when the process died is dropped."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record: dict[str, Any] = json.loads(line)
            first_dropped = resumed_at - 1 if record["axis"] == EVAL_AXIS else resumed_at
            kept = record["rollout_id"] < first_dropped
        except (ValueError, KeyError, TypeError) as error:
            fix = "Remove the line, or move the file away, to continue without what it has"
            raise damaged(Path(f"{path}:{number}"), error, fix) from error
        if kept:
            yield line.decode()
