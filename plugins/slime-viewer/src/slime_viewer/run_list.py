"""RunList: the runs of a page."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_core.controller.run_folder import RunFolder
from slime_core.errors import ConfigError
from slime_viewer.not_there import NotThere
from slime_viewer.open_run import OpenRun


class RunList:
    """Each run has the name of its folder, with `~2` and so on where two are equal.

    A folder of runs is read as those in it, the newest first; runs that begin later are found too.
    """

    def __init__(self, folders: Sequence[Path], *, hf_checkpoint: Path | None = None) -> None:
        """ConfigError for a folder that is not there."""
        self._folders = list(dict.fromkeys(path.resolve() for path in folders))
        self._hf_checkpoint = hf_checkpoint
        self._opened: dict[Path, OpenRun] = {}
        self._lock = threading.Lock()
        for folder in self._folders:
            if not folder.is_dir():
                raise ConfigError(f"{folder}: no such folder. Pass the folder of a run, such as runs/NAME.")

    def __iter__(self) -> Iterator[OpenRun]:
        with self._lock:
            paths = dict.fromkeys(path for folder in self._folders for path in runs_in(folder))
            runs = [self._open(path) for path in paths]
        return iter(runs)

    def close(self) -> None:
        """Before the interpreter ends."""
        for run in list(self._opened.values()):
            run.close()

    def find(self, name: str) -> OpenRun:
        """NotThere, with what there is."""
        runs = {run.id: run for run in self}
        if name not in runs:
            raise NotThere(f"no run {name!r}; there are {', '.join(runs)}.")
        return runs[name]

    def named(self, names: str) -> list[OpenRun]:
        """Runs of a list with commas, all of them for an empty one. Errors of `find`."""
        return [self.find(name) for name in names.split(",") if name] or list(self)

    def _open(self, path: Path) -> OpenRun:
        if path not in self._opened:
            taken = {run.id for run in self._opened.values()}
            name, number = path.name or "run", 1
            while name in taken:
                number += 1
                name = f"{path.name}~{number}"
            self._opened[path] = OpenRun(name, path, hf_checkpoint=self._hf_checkpoint)
        return self._opened[path]


def runs_in(folder: Path) -> list[Path]:
    """The folder itself if it is a run, or if none of the folders in it is."""
    if RunFolder(folder).manifest.exists():
        return [folder]
    try:
        found = [(RunFolder(path).manifest.stat().st_mtime, path) for path in folder.iterdir() if is_run(path)]
    except OSError:
        # A folder was removed meanwhile: the next time.
        return [folder]
    return [path for _, path in sorted(found, reverse=True)] or [folder]


def is_run(path: Path) -> bool:
    return RunFolder(path).manifest.is_file()
