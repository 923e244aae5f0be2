"""Rows of data files, read from disk by number: no file is held in memory as Python objects."""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from slime_core.errors import DataError, near_matches
from slime_sources.data_path import DataPath

CHUNK_BYTES: Final = 4 << 20
ROW_GROUP_CACHE_BYTES: Final = 512 << 20
"""Decoded row groups kept of one Parquet file. A shuffled file larger than this decodes a row group for most draws:
write it with small row groups."""


class RowFile(ABC):
    """One data file. `read` raises DataError, with the row's origin, for a row that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def num_rows(self) -> int: ...

    @abstractmethod
    def read(self, row: int) -> Mapping[str, Any]: ...

    @abstractmethod
    def origin(self, row: int) -> str:
        """File and place of a row, for error messages."""

    @cached_property
    def content_hash(self) -> str:
        """xxh3-128 of the file's bytes, in hex."""
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


class JsonlFile(RowFile):
    """One JSON object per line; empty lines are skipped. Keeps 8 bytes per row in memory, the start of its line."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        newlines, self.content_hash = self._scan()
        starts = np.concatenate([np.zeros(1, np.int64), newlines + 1])
        lengths = np.concatenate([newlines, [len(self._bytes)]]) - starts
        filled = lengths > 0
        short = np.flatnonzero(lengths == 1)
        filled[short] = np.frombuffer(self._bytes, np.uint8)[starts[short]] != ord("\r")
        self._starts = starts[filled]
        # Line numbers differ from row numbers only after an empty line inside the file.
        self._lines = None if filled[: len(self._starts)].all() else np.flatnonzero(filled)

    def _scan(self) -> tuple[npt.NDArray[np.int64], str]:
        """Positions of all newlines, and the content hash, in one pass over the file."""
        digest = xxhash.xxh3_128()
        newlines = []
        for at in range(0, len(self._bytes), CHUNK_BYTES):
            chunk = np.frombuffer(self._bytes, np.uint8, min(CHUNK_BYTES, len(self._bytes) - at), at)
            digest.update(chunk.data)
            newlines.append(np.flatnonzero(chunk == ord("\n")) + at)
        return np.concatenate(newlines), digest.hexdigest()

    @property
    def num_rows(self) -> int:
        return len(self._starts)

    def read(self, row: int) -> Mapping[str, Any]:
        stop = int(self._starts[row + 1]) if row + 1 < len(self._starts) else len(self._bytes)
        return json_row(self._bytes[int(self._starts[row]) : stop], lambda: self.origin(row))

    def origin(self, row: int) -> str:
        line = row if self._lines is None else self._lines[row]
        return f"{self.path}, line {line + 1}"


class ParquetFile(RowFile):
    """Decodes a row group when one of its rows is read, and caches the last few."""

    def __init__(self, path: Path, *, cache_bytes: int = ROW_GROUP_CACHE_BYTES) -> None:
        super().__init__(path)
        try:
            self._file = pq.ParquetFile(path)
            names = self._file.schema_arrow.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path}: it has several columns with the name {', '.join(twice)}. Rename them.")
        metadata = self._file.metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._firsts: list[int] = [0, *accumulate(counts)]
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()

    @property
    def num_rows(self) -> int:
        return self._firsts[-1]

    def read(self, row: int) -> Mapping[str, Any]:
        group = bisect_right(self._firsts, row) - 1
        try:
            table = self._row_group(group)
            values: dict[str, Any] = table.slice(row - self._firsts[group], 1).to_pylist()[0]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.origin(row)}: it cannot be decoded: {error}") from error
        return {key: _without_absent(value) for key, value in values.items()}

    def _row_group(self, group: int) -> pa.Table:
        if group not in self._cache:
            self._cache[group] = self._file.read_row_group(group)
            while len(self._cache) > 1 and sum(table.nbytes for table in self._cache.values()) > self._cache_bytes:
                self._cache.popitem(last=False)
        self._cache.move_to_end(group)
        return self._cache[group]

    def origin(self, row: int) -> str:
        return f"{self.path}, row {row}"


class RowRanges:
    """Ranges of rows of one or more files, concatenated."""

    def __init__(self, ranges: Sequence[tuple[RowFile, range]]) -> None:
        self.ranges = ranges
        self._firsts = [0, *accumulate(len(rows) for _, rows in ranges)]

    @classmethod
    def open(cls, paths: Sequence[DataPath]) -> RowRanges:
        """Opens the files. DataError for a path that is no file, is of an unknown kind, or has no rows."""
        return cls([_open_range(path) for path in paths])

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, row: int) -> Mapping[str, Any]:
        file, place = self._find(row)
        return file.read(place)

    def origin(self, row: int) -> str:
        file, place = self._find(row)
        return file.origin(place)

    def folder(self, row: int) -> Path:
        """Folder of the row's file."""
        file, _ = self._find(row)
        return file.path.parent

    def _find(self, row: int) -> tuple[RowFile, int]:
        which = bisect_right(self._firsts, row) - 1
        file, rows = self.ranges[which]
        return file, rows[row - self._firsts[which]]


KINDS: Final[Mapping[str, type[RowFile]]] = {".jsonl": JsonlFile, ".parquet": ParquetFile}


def _open_range(asked: DataPath) -> tuple[RowFile, range]:
    path = Path(asked.path)
    check_file(path, str(asked))
    if path.stat().st_size == 0:
        raise DataError(f'prompt_data "{asked}": the file is empty')
    try:
        file = KINDS[path.suffix](path)
    except OSError as error:
        raise DataError(f'prompt_data "{asked}": the file cannot be read: {error}') from error
    rows = asked.rows(file.num_rows)
    if not rows:
        raise DataError(f'prompt_data "{asked}": no rows are left; the file has {file.num_rows}')
    return file, rows


def check_file(path: Path, asked: str) -> None:
    """DataError for a path that is no file of rows."""
    try:
        is_file = path.is_file()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f'prompt_data "{asked[:80]}": not the name of a file: {reason}') from error
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in KINDS)
        there = f"name the files in it: {', '.join(inside[:5])}" if inside else "it holds no .jsonl or .parquet file"
        raise DataError(f'prompt_data "{asked}": {path} is a folder; {there}')
    if not is_file and path.exists():
        raise DataError(
            f'prompt_data "{asked}": {path} is a pipe or a device. Rows are read more than once; write them to a file'
        )
    if not is_file:
        beside = (
            near_matches(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else []
        )
        hint = f"close match: {', '.join(beside)}" if beside else f"looked from {Path.cwd()}"
        raise DataError(f'prompt_data "{asked}": there is no file {path}; {hint}')
    if path.suffix not in KINDS:
        kind = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise DataError(f'prompt_data "{asked}": the file {kind}; {" and ".join(KINDS)} can be read')


def json_row(line: bytes, origin: Callable[[], str]) -> Mapping[str, Any]:
    """The row of a line of JSON. DataError, which begins with the `origin`, if it holds none."""
    line = line.strip()
    try:
        value = DECODER.decode(line.decode("utf-8-sig"))
        is_deep = line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH
    except RecursionError:
        is_deep = True
    except ValueError as error:
        raise DataError(f"{origin()}: not valid JSON ({error}): found {_excerpt(line)}") from error
    if is_deep:
        raise DataError(f"{origin()}: lists and objects are nested more than {MAX_DEPTH} deep: found {_excerpt(line)}")
    if not isinstance(value, dict):
        raise DataError(f"{origin()}: a row is a JSON object, found {_excerpt(line)}")
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects."""
    depth, level = 0, [value]
    while level := [inner for inner in level if isinstance(inner, dict | list)]:
        depth += 1
        level = [child for inner in level for child in (inner.values() if isinstance(inner, dict) else inner)]
    return depth


def _with_own_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f'key "{twice}" occurs twice in one object')
    return found


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER: Final = json.JSONDecoder(parse_constant=_reject_constant, object_pairs_hook=_with_own_keys)
"""NaN and infinity are not JSON."""
MAX_DEPTH: Final = 100
"""Python's own limit for JSON is near 1,000; what reads rows after that has lower ones."""


def _excerpt(line: bytes, length: int = 80) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= length else text[:length] + "…")


def _without_absent(value: Any) -> Any:
    # In Parquet all structs of a column have all fields: those that a row lacked come back as None.
    if isinstance(value, dict):
        return {key: _without_absent(child) for key, child in value.items() if child is not None}
    if isinstance(value, list):
        return [_without_absent(child) for child in value]
    return value
