"""The trainer's numbers of each response token, as a Parquet file with a row for each sample of the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.atomic_io.atomic_file import write_atomically
from slime_core.data.train_data import lists
from slime_core.types.batch import Batch, TokenColumns

REPEATED: Final = frozenset({"advantages", "returns", "loss_weight", "correction"})
"""Often one number for a whole sample: a dictionary makes them small. Bytes of the others are written side by side."""


def write_tokens(path: Path, batch: Batch, columns: TokenColumns) -> None:
    """Raises StorageError if that fails. Columns that the algorithm did not need are not there."""
    table = {"index": pa.array(batch.index)}
    table |= {
        name: lists(values.astype(np.float32, copy=False), batch.response_length)
        for name, values in columns.present().items()
    }
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in columns.present() if name not in REPEATED}
    write_atomically(
        path,
        lambda aside: pq.write_table(
            pa.table(table),
            aside,
            compression="zstd",
            compression_level=1,
            use_dictionary=[f"{name}.list.element" for name in columns.present() if name in REPEATED],
            column_encoding=split or None,
        ),
    )
