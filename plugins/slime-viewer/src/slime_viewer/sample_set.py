"""SampleSet: the samples of one set of a run, indexed in a thread while they are asked for."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Final

import duckdb
import numpy as np
import pyarrow as pa

from slime_core.errors import DataError
from slime_viewer.dumps import step_files
from slime_viewer.sample_index import StepIndex, build_index
from slime_viewer.sample_numbers import StepFile, read_columns
from slime_viewer.sample_table import SampleTable
from slime_viewer.view_folder import ViewFolder

ADDED_TOGETHER: Final = 64


class SampleSet:
    """What was indexed is in `table`. `refresh` begins to index what is new; `need` waits for one step."""

    def __init__(self, run_folder: Path, name: str) -> None:
        self.name: Final = name
        self.table: Final = SampleTable()
        self.files: dict[int, StepFile] = {}
        self.unreadable: dict[int, str] = {}
        """Steps whose file cannot be read, with the reason."""
        self._folder = run_folder
        self._place = index_folder(run_folder, name)
        self._failed: dict[int, str] = {}
        """Keys of files that could not be read."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def refresh(self) -> None:
        """Looks for new, changed and removed files."""
        files = step_files(self._folder, self.name)
        with self._lock:
            gone = self.files.keys() - files.keys()
            self.files = files
            if gone:
                self.table.remove(sorted(gone))
                for step in gone:
                    self.unreadable.pop(step, None)
            if self._missing() and not self._is_closed and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._index_missing, name=f"index {self.name}", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends indexing, after the step at hand. A thread within DuckDB or Arrow while the interpreter ends would abort it."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def is_complete(self) -> bool:
        return not self._missing()

    @property
    def share_indexed(self) -> float:
        """Of the steps."""
        return 1 - len(self._missing()) / max(len(self.files), 1)

    def need(self, step: int) -> StepFile:
        """The step's files, indexed. DataError if there is no such step, or it cannot be read."""
        file = self.files.get(step)
        if file is None:
            known = (
                f"there are {len(self.files)}, {min(self.files)} to {max(self.files)}"
                if self.files
                else "there is none"
            )
            raise DataError(f"{self._folder}: step {step} of {self.name} is not there; {known}.")
        if self.table.key_of(step) != file.key:
            self._add([file])
        if step in self.unreadable:
            raise DataError(self.unreadable[step])
        return file

    def last_step(self) -> int:
        """DataError if there is none."""
        if not self.files:
            raise DataError(f"{self._folder}: no samples of {self.name}.")
        return max(self.files)

    def find(self, sample: int) -> None:
        """Indexes the newest step that has the sample, if it is in none that was indexed."""
        for file in self._missing()[::-1]:
            if sample in indices_of(file):
                self._add([file])
                return

    def index_range(self) -> tuple[int, int] | None:
        """The least and the greatest number of a sample, in steps that are not indexed yet too."""
        unread = [(numbers.min(), numbers.max()) for file in self._missing() if (numbers := indices_of(file)).size]
        ranges = [found for found in (self.table.index_range(), *unread) if found is not None]
        return (int(min(low for low, _ in ranges)), int(max(high for _, high in ranges))) if ranges else None

    def _missing(self) -> list[StepFile]:
        return [
            file
            for step, file in self.files.items()
            if self.table.key_of(step) != file.key and self._failed.get(step) != file.key
        ]

    def _index_missing(self) -> None:
        """The newest first: they are looked at first."""
        while (missing := self._missing()[::-1]) and not self._is_closed:
            known = [file for file in missing if StepIndex(self._place, file.step, file.key).is_there]
            self._add(known[:ADDED_TOGETHER] or missing[:1])

    def _add(self, files: list[StepFile]) -> None:
        indices = []
        for file in files:
            try:
                index = StepIndex(self._place, file.step, file.key)
                indices.append(index if index.is_there else build_index(file, self._place))
            except (DataError, OSError) as error:
                # A file that is being replaced is another one the next time.
                self._failed[file.step], self.unreadable[file.step] = file.key, str(error)
            else:
                self.unreadable.pop(file.step, None)
        if not indices:
            return
        try:
            self.table.add(indices)
        except (pa.ArrowException, OSError, duckdb.Error) as error:
            for index in indices:
                self._failed[index.step] = index.key
                self.unreadable[index.step] = f"{index.path('numbers')}: {error}"


def indices_of(file: StepFile) -> np.ndarray:
    """The numbers of a step's samples, int64. None if its file is not readable now; `unreadable` will have it."""
    try:
        return np.asarray(read_columns(file.groups, ["index"])["index"].drop_null().to_numpy(), np.int64)
    except (DataError, KeyError):
        return np.zeros(0, np.int64)


def index_folder(run_folder: Path, name: str) -> Path:
    """In the run folder; of one that cannot be written, in a folder for temporary files."""
    if os.access(run_folder, os.W_OK):
        return ViewFolder(run_folder).index(name)
    return Path(tempfile.mkdtemp(prefix="slime-view-"))
