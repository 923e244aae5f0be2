"""Recording: the thread that writes what the observer gives it."""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa

from slime_core.atomic_io.storage import written
from slime_core.data.table import dump_file, dumped_steps, groups_to_table, write_table
from slime_core.errors import DataError, StorageError
from slime_core.types.batch import Batch, TokenColumns
from slime_core.types.sample import SampleGroup
from slime_viewer.memory_in_use import HOST, memory_in_use
from slime_viewer.plan_recording import PlanRecording
from slime_viewer.token_file import write_tokens
from slime_viewer.view_folder import ViewFolder

MOST_BYTES: Final = 2**30
"""Of samples of trained steps, the trainer's numbers included."""
MOST_EVAL_BYTES: Final = 2**28
"""Of samples of one evaluation set."""
MOST_WAITING: Final = 64
"""Things that wait to be written; more, and the run waits."""
MEASURED_EVERY_S: Final = 5.0
CLOSING_S: Final = 60.0
CREDIT_S: Final = 2.0
MOST_SHARE: Final = 0.01
"""Of the run's time, after the first CREDIT_S: seconds of the processor that writing steps may take. Where steps are short, not
all of them are written."""


class Recording:
    """What one attempt of a run records. The first thing that cannot be written ends it, with a line on standard error."""

    def __init__(self, run_folder: Path, *, attempt: int, most_bytes: int = MOST_BYTES) -> None:
        self._view = ViewFolder(run_folder)
        self._attempt = attempt
        self._most_bytes = most_bytes
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._times: IO[str] | None = None
        self._plan = PlanRecording(run_folder)
        self._gpu_bytes: int | None = None
        """Memory of the largest GPU of this machine."""
        self._next_measurement = 0.0
        self._has_failed = False
        self._began = time.monotonic()
        self._spent = 0.0
        """Seconds of the processor that the thread has used."""
        self._chosen: dict[int, bool] = {}
        self._thread = threading.Thread(target=self._work, name="slime-viewer records", daemon=True)
        self._thread.start()

    def takes(self, step: int) -> bool:
        """Whether this step is written: the same for its groups and its tokens."""
        if step not in self._chosen:
            allowed = CREDIT_S + MOST_SHARE * (time.monotonic() - self._began)
            self._chosen[step] = self._spent <= allowed
            self._chosen.pop(step - MOST_WAITING, None)
        return self._chosen[step]

    def do(self, write: Callable[[], None]) -> None:
        """Does it in the thread, after everything before it."""
        self._waiting.put(write)

    def end(self) -> None:
        """Waits until everything is written."""
        self._waiting.put(None)
        self._thread.join(CLOSING_S)

    def _work(self) -> None:
        while (write := self._waiting.get()) is not None:
            if self._has_failed:
                continue
            try:
                write()
            except (StorageError, DataError, OSError, pa.ArrowException) as error:
                self._has_failed = True
                print(f"slime-viewer records nothing more of this run for `slime view`: {error}", file=sys.stderr)
            self._spent = time.thread_time()
        self._plan.end()
        if self._times is not None:
            self._times.close()

    # ------------------------------------------------------------ in the thread

    def write_groups(self, step: int, groups: Sequence[SampleGroup]) -> None:
        self._view.groups.mkdir(parents=True, exist_ok=True)
        write_table(dump_file(self._view.groups, step), groups_to_table(groups))
        self._thin_out()

    def write_tokens(self, step: int, batch: Batch, columns: TokenColumns) -> None:
        self._view.tokens.mkdir(parents=True, exist_ok=True)
        write_tokens(dump_file(self._view.tokens, step), batch, columns)
        self._thin_out()

    def write_evaluation(self, name: str, step: int, groups: Sequence[SampleGroup]) -> None:
        """`step`: of the axis `eval/step`."""
        folder = self._view.eval_set(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_table(dump_file(folder, step), groups_to_table(groups))
        thin_out([folder], min(MOST_EVAL_BYTES, self._most_bytes))

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Of times.jsonl."""
        with written(self._view.times):
            if self._times is None:
                self._view.path.mkdir(parents=True, exist_ok=True)
                self._times = self._view.times.open("a", encoding="utf-8")
            self._times.write(json.dumps({**line, "attempt": self._attempt}) + "\n")
            self._times.flush()

    def write_memory(self) -> None:
        """At most every few seconds, and for at most MOST_SHARE of the time: programs that measure may be slow."""
        began = time.monotonic()
        if began < self._next_measurement:
            return
        # What `slime plan` holds is no memory of the run.
        if not self._plan.is_counting:
            memory = memory_in_use()
            self.write_line({"time": round(time.time(), 3), "memory": memory})
            self._gpu_bytes = max((there for what, (_, there) in memory.items() if what != HOST), default=None)
        with written(self._view.plan):
            self._plan.advance(self._gpu_bytes)
        self._next_measurement = began + max(MEASURED_EVERY_S, (time.monotonic() - began) / MOST_SHARE)

    def _thin_out(self) -> None:
        thin_out([self._view.groups, self._view.tokens], self._most_bytes)


def thin_out(folders: Sequence[Path], most_bytes: int) -> None:
    """Removes steps until the rest has at most so many bytes. The newest stays; of the others those go first that have near
    neighbours for their age, so that old steps become sparse and new ones stay dense."""
    sizes: dict[int, int] = {}
    for folder in folders:
        for step in dumped_steps(folder):
            sizes[step] = sizes.get(step, 0) + dump_file(folder, step).stat().st_size
    total = sum(sizes.values())
    while total > most_bytes and len(sizes) > 1:
        step = first_to_go(sorted(sizes))
        total -= sizes.pop(step)
        for folder in folders:
            dump_file(folder, step).unlink(missing_ok=True)


def first_to_go(steps: Sequence[int]) -> int:
    """Of at least two steps, in order."""
    if len(steps) == 2:
        return steps[0]
    newest = steps[-1]
    inner = zip(steps, steps[1:], steps[2:], strict=False)
    return min(((after - before) / (newest - step + 1), step) for before, step, after in inner)[1]
