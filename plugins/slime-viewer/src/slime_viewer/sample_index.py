"""StepIndex: what a step's file of groups is searched and sorted by, on disk, so that it is computed once.

Beside the numbers (an Arrow file) there are the signatures of the texts and the texts themselves, uncompressed: a table shows a
hundred samples of a hundred steps, and a Parquet file cannot give one of its thousand texts without decoding the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from slime_viewer.sample_numbers import COLUMNS, StepFile, read_columns, sample_numbers
from slime_viewer.trigrams import by_bit, folded, signatures

NUMBERS: Final = "numbers"
BITS: Final = "bits"
TEXT: Final = "text"
FORM: Final = "3"
"""In the names of files: another form of the index is another file."""
TEXT_COLUMNS: Final = ("prompt", "response", "raw_response", "messages")
PLACES: Final = ("prompt_start", "prompt_end", "response_start", "response_end")
"""Bytes of a sample's texts in the file of texts: each prompt once, then the responses, one after the other."""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Files of one step."""

    folder: Path
    step: int
    key: str

    def path(self, kind: str) -> Path:
        return self.folder / f"step_{self.step:06d}.{self.key}.{FORM}.{kind}"

    @property
    def is_there(self) -> bool:
        return self.path(NUMBERS).exists()

    def numbers(self) -> pa.Table:
        """A row for each sample."""
        with pa.OSFile(str(self.path(NUMBERS))) as file:
            return pa.ipc.open_file(file).read_all()

    def with_bits(self, bits: Sequence[int], rows: int) -> npt.NDArray[np.int64]:
        """Rows whose texts have all these bits."""
        width = -(-rows // 8)
        found = np.full(width, 255, np.uint8)
        file = os.open(self.path(BITS), os.O_RDONLY)
        try:
            for bit in bits:
                found &= np.frombuffer(os.pread(file, width, bit * width), np.uint8)
                if not found.any():
                    break
        finally:
            os.close(file)
        return np.flatnonzero(np.unpackbits(found, count=rows))

    def texts(self, places: npt.NDArray[np.int64]) -> list[str]:
        """Texts at [start, end) bytes; `places` is (texts, 2)."""
        file = os.open(self.path(TEXT), os.O_RDONLY)
        try:
            return [os.pread(file, end - start, start).decode() for start, end in places.tolist()]
        finally:
            os.close(file)

    def read_texts(self, into: memoryview) -> None:
        """Reads the file of texts, or as much of it as there is place for. OSError if it is shorter."""
        with self.path(TEXT).open("rb", buffering=0) as file:
            if file.readinto(into) != len(into):
                raise OSError(f"{file.name}: is shorter than it was written")

    def remove_others(self) -> None:
        """Removes files of the step that are of another state of its dumps."""
        for path in self.folder.glob(f"step_{self.step:06d}.*"):
            if not path.name.startswith(f"step_{self.step:06d}.{self.key}.{FORM}."):
                path.unlink(missing_ok=True)


def build_index(file: StepFile, folder: Path) -> StepIndex:
    """Raises DataError if a dump cannot be read, OSError if the folder cannot be written."""
    index = StepIndex(folder, file.step, file.key)
    table = read_columns(file.groups, [*COLUMNS, *TEXT_COLUMNS])
    numbers = sample_numbers(file, table)
    rows = numbers["row"].tolist()
    prompts, responses = table["prompt"].to_pylist(), table["response"].to_pylist()
    raw = table["raw_response"].to_pylist() if "raw_response" in table.column_names else [None] * table.num_rows
    known = dict.fromkeys(prompts[row] for row in rows)
    of_prompt = {prompt: number for number, prompt in enumerate(known)}
    number = np.array([of_prompt[prompts[row]] for row in rows], np.int64)
    texts = [raw[row] or responses[row] or "" for row in rows]
    written = [text.encode() for text in (*known, *texts)]
    ends = np.cumsum([0, *map(len, written)], dtype=np.int64)
    first = len(known) + np.arange(len(rows))
    places = {
        "prompt_start": ends[number],
        "prompt_end": ends[number + 1],
        "response_start": ends[first],
        "response_end": ends[first + 1],
    }
    found = signatures((folded(text).encode() for text in texts), len(rows))
    found |= signatures((folded(prompt).encode() for prompt in known), len(known))[:, number]
    columns = {**numbers, **places}
    folder.mkdir(parents=True, exist_ok=True)
    replace(index.path(TEXT), written)
    replace(index.path(BITS), [by_bit(found).tobytes()])
    arrow = pa.table({name: arrow_column(values) for name, values in columns.items()})
    aside = beside(index.path(NUMBERS))
    with pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, arrow.schema) as writer:
        writer.write_table(arrow)
    aside.replace(index.path(NUMBERS))
    index.remove_others()
    return index


def arrow_column(values: Any) -> pa.Array:
    """NaN becomes null, as databases sort it."""
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else pa.array(values, from_pandas=True)


def replace(path: Path, pieces: Iterable[bytes]) -> None:
    """An index that a crash left incomplete is found by the file of numbers, which comes last."""
    aside = beside(path)
    with aside.open("wb") as file:
        file.writelines(pieces)
    aside.replace(path)


def beside(path: Path) -> Path:
    """Another one for each thread: several may build the same index."""
    return path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
