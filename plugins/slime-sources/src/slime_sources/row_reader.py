"""Rows of one file by their place in it; what has been read is not kept."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slime_core.errors import DataError


class Place(NamedTuple):
    """Where a row begins: of JSON lines the byte and the line, of Parquet the row twice."""

    at: int
    number: int


class RowReader(ABC):
    """DataError, with the row's origin, for a row that cannot be read."""

    first: Final = Place(0, 0)

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def next(self, place: Place) -> tuple[Place, Place] | None:
        """The row that begins at `place` or after it, and where to look for the one behind it; None: there is none yet."""

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
        """The file's name and a hash of how it begins."""


class LineReader(RowReader):
    """JSON lines. The last line counts once it is whole: a newline ends it, or it is a JSON object already."""

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
        line = self._line(place.at)
        try:
            value = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
        except ValueError as error:
            raise DataError(f"{self.origin(place)}: not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise DataError(f"{self.origin(place)}: a row is a JSON object, found {line[:80]!r}")
        return value

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
    """One row group is decoded at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
        metadata = self._file.metadata
        counts = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._firsts: list[int] = [0, *accumulate(counts)]
        self._group = -1
        self._table: pa.Table | None = None

    def next(self, place: Place) -> tuple[Place, Place] | None:
        row = place.at
        return (Place(row, row), Place(row + 1, row + 1)) if row < self._firsts[-1] else None

    def read(self, place: Place) -> Mapping[str, Any]:
        group = bisect_right(self._firsts, place.at) - 1
        if group != self._group or self._table is None:
            try:
                self._table, self._group = self._file.read_row_group(group), group
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{self.origin(place)}: its row group cannot be decoded: {error}") from error
        rows: list[dict[str, Any]] = self._table.slice(place.at - self._firsts[group], 1).to_pylist()
        return {key: value for key, value in rows[0].items() if value is not None}

    def reaches(self, place: Place) -> bool:
        return place.at <= self._firsts[-1]

    def origin(self, place: Place) -> str:
        return f"{self.path}, row {place.number}"

    @property
    def head(self) -> str:
        return f"{self.path.name} {self._file.schema_arrow} {self._firsts}"


READERS: Final[Mapping[str, type[RowReader]]] = {".jsonl": LineReader, ".parquet": ParquetReader}


def open_reader(path: str) -> RowReader:
    """DataError for what is no file, or of an unknown kind."""
    file = Path(path)
    if file.suffix not in READERS:
        raise DataError(f'prompt_data "{path}": {" and ".join(READERS)} files can be streamed')
    if not file.is_file():
        raise DataError(f'prompt_data "{path}": there is no such file (looked from {Path.cwd()})')
    return READERS[file.suffix](file)


def _is_object(line: bytes) -> bool:
    try:
        value: object = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, dict)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
