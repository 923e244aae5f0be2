"""SampleNumbers: what tables of samples show and sort by, computed from a step's file of groups: a row for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.data.train_data import COLUMN as TRAIN_DATA_COLUMN
from slime_core.errors import DataError

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

COLUMNS: Final = (
    "group", "group_index", "index", "status", "reward", "reward_parts", "counts", "prompt_length", "loss_mask",
    "rollout_log_probs", "spans",
)  # fmt: skip
PART: Final = "part:"
COUNT: Final = "count:"
"""What the columns of named numbers begin with."""

PREFIX: Final = TRAIN_DATA_COLUMN
"""Of these columns in the files of --save-debug-train-data."""
TRAINER_COLUMNS: Final = ("advantages", "old_log_probs", "entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """The files of a step, and the state that they were in."""

    step: int
    groups: Path
    tokens: Path | None
    """The columns of the trainer."""
    key: str
    """Changes with the content of either file."""


def read_columns(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Columns that the file lacks are left out. DataError if it cannot be read."""
    try:
        with pq.ParquetFile(path, memory_map=False) as file:
            there = file.schema_arrow.names
            asked = there if columns is None else [name for name in columns if name in there]
            return file.read(columns=asked, use_threads=False).combine_chunks()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def sample_numbers(file: StepFile, table: pa.Table) -> dict[str, Any]:
    """Columns by name, (samples,): float64 with NaN where unknown, int64 for numbers, and texts (`status`). `table`: COLUMNS.

    DataError if it is no table of groups.
    """
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(f"{file.groups}: not a table of sample groups: it lacks {', '.join(missing)}")
    row = np.flatnonzero(table["index"].is_valid().to_numpy())
    table = table.take(pa.array(row))
    lengths, mask = ragged(table["loss_mask"])
    trained = sums(mask, lengths)
    index = integers(table["index"])
    numbers: dict[str, Any] = {
        "step": np.full(len(row), file.step, np.int64),
        "row": row.astype(np.int64),
        "place": integers(table["group"]),
        "group": integers(table["group_index"]),
        "index": index,
        "part": parts_of(index),
        "status": table["status"],
        "reward": floats(table["reward"]),
        "tokens": lengths.astype(np.int64),
        "trained": trained.astype(np.int64),
        "log_prob": masked_mean(ragged(table["rollout_log_probs"])[1], mask, lengths, trained),
    }
    numbers |= versions(table["spans"])
    numbers |= {name: np.full(len(row), np.nan) for name in ("advantage", "mismatch", "entropy")}
    if file.tokens is not None:
        numbers |= trainer_means(file.tokens, index, table, mask, lengths, trained)
    for prefix, column in ((PART, "reward_parts"), (COUNT, "counts")):
        numbers |= {prefix + name: values for name, values in named(table[column]).items()}
    return numbers


def trainer_means(
    path: Path, index: Int64, groups: pa.Table, mask: Float64, lengths: Int64, trained: Float64
) -> Mapping[str, Float64]:
    """Means over trained tokens, from the trainer's columns. Empty if these are of other samples: the step was made again
    after a resume, and its file is not yet written."""
    table = trainer_columns(
        read_columns(path, [*TRAINER_COLUMNS, *(PREFIX + name for name in TRAINER_COLUMNS), "index"])
    )
    if "index" not in table.column_names or not np.array_equal(integers(table["index"]), index):
        return {}
    found: dict[str, Float64] = {}
    columns = {name: ragged(table[name])[1] for name in TRAINER_COLUMNS if name in table.column_names}
    if any(len(values) != len(mask) for values in columns.values()):
        return {}
    if "advantages" in columns:
        found["advantage"] = masked_mean(np.abs(columns["advantages"]), mask, lengths, trained)
    if "entropy" in columns:
        found["entropy"] = masked_mean(columns["entropy"], mask, lengths, trained)
    if "old_log_probs" in columns:
        gap = np.abs(columns["old_log_probs"] - ragged(groups["rollout_log_probs"])[1])
        found["mismatch"] = masked_mean(gap, mask, lengths, trained)
    return found


def trainer_columns(table: pa.Table) -> pa.Table:
    """The same under the names that `view/tokens` has."""
    return table.rename_columns([name.removeprefix(PREFIX) for name in table.column_names])


def parts_of(index: Int64) -> Int64:
    """How many earlier rows have the same index: an episode may return several samples."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.searchsorted(ordered, ordered)
    parts = np.empty(len(index), np.int64)
    parts[order] = np.arange(len(index)) - first
    return parts


def ragged(column: pa.ChunkedArray) -> tuple[Int64, npt.NDArray[Any]]:
    """Length of each row, 0 for null, and all values one after the other."""
    lists = column.combine_chunks()
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    return lengths, lists.flatten().to_numpy(zero_copy_only=False)


def sums(values: npt.NDArray[Any], lengths: Int64) -> Float64:
    """Sum over each row of a ragged column, in float64."""
    found = np.zeros(len(lengths))
    some = np.flatnonzero(lengths)
    if len(some):
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        found[some] = np.add.reduceat(values, starts[some], dtype=np.float64)
    return found


def masked_mean(values: npt.NDArray[Any], mask: npt.NDArray[Any], lengths: Int64, trained: Float64) -> Float64:
    """Mean over trained tokens of each row; NaN without any."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(trained > 0, sums(np.where(mask > 0, values, 0), lengths) / trained, np.nan)


def versions(column: pa.ChunkedArray) -> dict[str, Float64]:
    """The oldest and newest policy version among the tokens of each row; NaN without any."""
    lists = column.combine_chunks()
    lengths = np.nan_to_num(lists.value_lengths().to_numpy(zero_copy_only=False)).astype(np.int64)
    values = lists.flatten().field("version").to_numpy(zero_copy_only=False).astype(np.float64)
    oldest, newest = np.full(len(lengths), np.nan), np.full(len(lengths), np.nan)
    some = np.flatnonzero(lengths)
    if len(some):
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])[some]
        oldest[some], newest[some] = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return {"oldest": oldest, "newest": newest}


def named(column: pa.ChunkedArray) -> dict[str, Float64]:
    """A column of maps as a column for each name; NaN where a row lacks it."""
    maps = column.combine_chunks()
    offsets = maps.offsets.to_numpy()
    names = maps.keys.to_pylist()[offsets[0] : offsets[-1]]
    values = maps.items.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns: dict[str, Float64] = {}
    at = np.array(names, dtype=object)
    for name in dict.fromkeys(names):
        chosen = at == name
        columns[name] = np.full(len(lengths), np.nan)
        columns[name][rows[chosen]] = values[chosen]
    return columns


def integers(column: pa.ChunkedArray) -> Int64:
    return np.asarray(column.to_numpy(), np.int64)


def floats(column: pa.ChunkedArray) -> Float64:
    """NaN for null."""
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
