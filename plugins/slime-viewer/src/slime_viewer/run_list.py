"""RunList: the runs of a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_core.errors import ConfigError
from slime_viewer.not_there import NotThere
from slime_viewer.open_run import OpenRun


class RunList:
    """Each run has the name of its folder, with `~2` and so on where two are equal."""

    def __init__(self, folders: Sequence[Path], *, hf_checkpoint: Path | None = None) -> None:
        """ConfigError for a folder that is not there."""
        self._runs: dict[str, OpenRun] = {}
        for folder in dict.fromkeys(path.resolve() for path in folders):
            if not folder.is_dir():
                raise ConfigError(f"{folder}: no such folder. Pass the folder of a run, such as runs/NAME.")
            name, number = folder.name or "run", 1
            while name in self._runs:
                number += 1
                name = f"{folder.name}~{number}"
            self._runs[name] = OpenRun(name, folder, hf_checkpoint=hf_checkpoint)

    def __iter__(self) -> Iterator[OpenRun]:
        return iter(self._runs.values())

    def find(self, name: str) -> OpenRun:
        """NotThere, with what there is."""
        if name not in self._runs:
            raise NotThere(f"no run {name!r}; there are {', '.join(self._runs)}.")
        return self._runs[name]

    def named(self, names: str) -> list[OpenRun]:
        """Runs of a list with commas, all of them for an empty one. Errors of `find`."""
        return [self.find(name) for name in names.split(",") if name] or list(self)
