"""Tracker tensorboard: metrics as scalars in event files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from slime_core.contracts.tracker import RunInfo, Tracker
from slime_core.errors import ConfigError, StorageError
from slime_track.event_files import drop_rollouts_from, event_files, rollout_marker


class TensorBoardTracker(Tracker):
    """Writes one event file per attempt. Values are float32, as in TensorBoard."""

    def __init__(self, *, log_dir: str | None, project: str | None, experiment: str | None) -> None:
        self._log_dir = log_dir
        self._project = project
        self._experiment = experiment
        self._folder: Path | None = None
        self._writer: EventFileWriter | None = None

    def start(self, run: RunInfo) -> None:
        """Removes the events of steps that a resumed run repeats. ConfigError if a new run's folder has events already."""
        self._folder = folder = self.folder(run)
        with _storage_errors(folder):
            if run.resumed_at is not None:
                drop_rollouts_from(folder, run.resumed_at)
            elif event_files(folder):
                raise ConfigError(
                    f"tracker 'tensorboard': {folder} has the events of another run. Resume that run, delete its "
                    "events, or set another folder with tb_experiment_name or log_dir."
                )
            # The suffix makes names unique: a restarted container may have the same process id within the same second.
            self._writer = EventFileWriter(str(folder), filename_suffix=f".attempt{run.attempt}")

    def log(self, axis: str, step: int, metrics: Mapping[str, float], *, rollout_id: int) -> None:
        """Writes to disk before it returns, so a killed run has all metrics up to its last checkpoint."""
        assert self._folder is not None
        assert self._writer is not None
        now = time.time()
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        with _storage_errors(self._folder):
            self._writer.add_event(rollout_marker(rollout_id, step=step, wall_time=now))
            self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
            self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None and self._folder is not None:
            with _storage_errors(self._folder):
                self._writer.close()
            self._writer = None

    def folder(self, run: RunInfo) -> Path:
        """The folder for the events of `run`."""
        if self._log_dir is None:
            root, name = run.run_dir / "tensorboard", self._experiment
        else:
            root, name = Path(self._log_dir), self._experiment or run.name
        return root.joinpath(*(part for part in (self._project, name) if part is not None))


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"tracker 'tensorboard': cannot write events to {folder}: {error}.") from error
