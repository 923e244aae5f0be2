"""LineFile: the JSON lines of a file that another process may be writing, replacing or cutting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class LineFile:
    """Reads on from where it stopped. A last line without its end is left for the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        """The first line that is no JSON object, since the file was last begun anew."""
        self._file: tuple[int, int] | None = None
        """Device and inode."""
        self._offset = 0
        self._line = 0

    def read_on(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file was begun anew, so that what was read before no longer holds, and the objects since then. A file
        that is not there has none."""
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            return self._begin_anew(None), []
        except OSError as error:
            self.problem = f"{self.path.name} cannot be read: {error.strerror}"
            return False, []
        with file:
            status = os.fstat(file.fileno())
            anew = False
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                anew = self._begin_anew((status.st_dev, status.st_ino))
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return anew, [found for line in whole.splitlines() if (found := self._parse(line)) is not None]

    def _begin_anew(self, file: tuple[int, int] | None) -> bool:
        had_lines = self._offset > 0
        self._file, self._offset, self._line, self.problem = file, 0, 0, None
        return had_lines

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        self._line += 1
        if not line.strip():
            return None
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
        self.problem = self.problem or f"{self.path.name}, line {self._line}: no JSON object"
        return None
