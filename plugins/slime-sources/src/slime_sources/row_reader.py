"""RowReader: reads single rows of a file by their place, and caches none."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as pq
import xxhash

from slime_core.errors import DataError
from slime_sources.rows import ParquetFile, check_file, json_row


class Place(NamedTuple):
    """Where a row begins: byte and line number of JSON lines, or the row number twice for Parquet."""

    at: int
    number: int


class RowReader(ABC):
    """Raises DataError, with the row's origin, for a row that cannot be read."""

    first: Final = Place(0, 0)

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def next(self, place: Place) -> tuple[Place, Place] | None:
        """The first row at `place` or after it, and the place after that row. None if there is no row yet."""

    @abstractmethod
    def read(self, place: Place) -> Mapping[str, Any]: ...

    @abstractmethod
    def reaches(self, place: Place) -> bool:
        """Whether the file is long enough for rows before `place`."""

    @abstractmethod
    def origin(self, place: Place) -> str: ...

    @property
    @abstractmethod
    def head(self) -> str:
        """The file's name and a hash of its beginning."""


class LineReader(RowReader):
    """Reads JSON lines. The last line counts once it is complete: it ends with a newline, or is a JSON object."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.open("rb")

    def next(self, place: Place) -> tuple[Place, Place] | None:
        at, number = place
        while True:
            line = self._line(at)
            if not line or not (line.endswith(b"\n") or _is_object(line)):
                return None
            if line.strip():
                return Place(at, number), Place(at + len(line), number + 1)
            at, number = at + len(line), number + 1

    def read(self, place: Place) -> Mapping[str, Any]:
        return json_row(self._line(place.at), lambda: self.origin(place))

    def reaches(self, place: Place) -> bool:
        return self.path.stat().st_size >= place.at

    def origin(self, place: Place) -> str:
        return f"{self.path}, line {place.number + 1}"

    @property
    def head(self) -> str:
        return f"{self.path.name} {xxhash.xxh3_128_hexdigest(self._line(0).rstrip())}"

    def _line(self, at: int) -> bytes:
        self._file.seek(at)
        return self._file.readline()


class ParquetReader(RowReader):
    """Reads Parquet. One row group is decoded at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = ParquetFile(path, cache_bytes=0)

    def next(self, place: Place) -> tuple[Place, Place] | None:
        row = place.at
        return (Place(row, row), Place(row + 1, row + 1)) if row < self._file.num_rows else None

    def read(self, place: Place) -> Mapping[str, Any]:
        return {key: value for key, value in self._file.read(place.at).items() if value is not None}

    def reaches(self, place: Place) -> bool:
        return place.at <= self._file.num_rows

    def origin(self, place: Place) -> str:
        return self._file.origin(place.at)

    @property
    def head(self) -> str:
        return f"{self.path.name} {pq.read_schema(self.path)} {self._file.num_rows}"


READERS: Final[Mapping[str, type[RowReader]]] = {".jsonl": LineReader, ".parquet": ParquetReader}


def open_reader(path: str) -> RowReader:
    """Opens a file. DataError if it does not exist, or is of an unknown kind."""
    file = Path(path)
    check_file(file, path)
    try:
        return READERS[file.suffix](file)
    except OSError as error:
        raise DataError(f'prompt_data "{path}": the file cannot be read: {error}') from error


def _is_object(line: bytes) -> bool:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)
