"""Train data: a batch with its per-token columns as a Parquet file, one row per sample, in order."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slime_core.atomic_io.atomic_file import write_atomically
from slime_core.data.table import rows_together
from slime_core.errors import DataError
from slime_core.types.batch import Batch, TokenColumns
from slime_core.types.batch_images import BatchImages
from slime_core.types.image import Image

COLUMN: Final = "column_"
"""Prefix of the columns of `TokenColumns`."""
IMAGES: Final = "images"
"""Images of a sample that no earlier sample has; `image_numbers` lists all its images."""
IMAGE_NUMBERS: Final = "image_numbers"
IMAGE_PLACES: Final = "image_places"
IMAGE_FRAMES: Final = "image_frames"
"""Frames of the images in `images`."""
BY_TOKEN: Final = ("tokens", "routed_experts")
BY_RESPONSE_TOKEN: Final = ("mask", "rollout_log_probs", "version", "token_reward")
OPTIONAL: Final = ("token_reward", "routed_experts", "images")
MOST_IN_LISTS: Final = np.iinfo(np.int32).max
SIZES: Final = "routed_experts_sizes"
"""[layers, top_k] of the expert ids, which are flat in the file."""


def train_data_file(folder: Path, step: int) -> Path:
    """File of the train data of a step."""
    return folder / f"step_{step:06d}.parquet"


def write_train_data(path: Path, batch: Batch, columns: TokenColumns) -> None:
    """Raises StorageError if that fails."""
    whole: dict[str, Any] = {}
    for field in fields(batch):
        values = getattr(batch, field.name)
        if values is None or isinstance(values, BatchImages):
            continue
        lengths = {BY_TOKEN: batch.total_length, BY_RESPONSE_TOKEN: batch.response_length}
        ragged = next((of for names, of in lengths.items() if field.name in names), None)
        if values.ndim == 3:
            whole[SIZES] = pa.array([values.shape[1:]] * batch.num_samples, pa.list_(pa.int32()))
            ragged, values = ragged * np.prod(values.shape[1:]), values.reshape(-1)
        whole[field.name] = pa.array(values) if ragged is None else lists(values, ragged)
    for name, values in columns.present().items():
        whole[COLUMN + name] = lists(values, batch.response_length)
    if batch.images is not None:
        whole |= image_columns(batch.images)
    table = pa.table(whole)
    together = None if batch.images is None else rows_together(table[IMAGES])
    write_atomically(path, lambda aside: pq.write_table(table, aside, compression="zstd", row_group_size=together))


def read_train_data(path: Path) -> tuple[Batch, TokenColumns]:
    """Reads exactly what was written. Raises DataError if the file is missing or of another kind."""
    if not path.is_file():
        there = len(list(path.parent.glob("step_*.parquet")))
        raise DataError(
            f"{path}: no such train data; {path.parent} holds {there} steps. Pass --num-rollout {there}, or set the "
            "train_data/ folder of another run with --save-debug-train-data."
        )
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    images = read_images(table) if IMAGES in table.column_names else None
    named = {
        name: flat(table[name])
        for name in table.column_names
        if name not in (IMAGES, IMAGE_NUMBERS, IMAGE_PLACES, IMAGE_FRAMES)
    }
    requested = [field.name for field in fields(Batch) if field.name not in OPTIONAL]
    if missing := [name for name in requested if name not in named]:
        raise DataError(f"{path}: not train data: it lacks {', '.join(missing)}")
    if (sizes := named.pop(SIZES, None)) is not None:
        named["routed_experts"] = named["routed_experts"].reshape(-1, *sizes[:2])
    own = {name: values for name, values in named.items() if not name.startswith(COLUMN)}
    batch = Batch(**own, images=images)
    columns = {name.removeprefix(COLUMN): values for name, values in named.items() if name.startswith(COLUMN)}
    return batch, TokenColumns(**columns)


def image_columns(images: BatchImages) -> dict[str, pa.Array]:
    """Distinct images are numbered in order of first use, so the new ones of a sample are consecutive."""
    known = 0
    new: list[list[Image]] = []
    for sample in range(len(images.counts)):
        end = max(known, int(images.of_sample(sample).max(initial=-1)) + 1)
        new.append([images.image(number) for number in range(known, end)])
        known = end
    places = [images.places_of(sample) for sample in range(len(images.counts))]
    return {
        IMAGES: pa.array([[image.data for image in row] for row in new], pa.list_(pa.binary())),
        IMAGE_FRAMES: pa.array([[image.frames for image in row] for row in new], pa.list_(pa.int32())),
        IMAGE_NUMBERS: lists(images.which, images.counts),
        IMAGE_PLACES: pa.array(places, pa.list_(pa.list_(pa.int32()))),
    }


def read_images(table: pa.Table) -> BatchImages | None:
    data, frames = ([value for row in table[name].to_pylist() for value in row] for name in (IMAGES, IMAGE_FRAMES))
    rows = zip(table[IMAGE_NUMBERS].to_pylist(), table[IMAGE_PLACES].to_pylist(), strict=True)
    return BatchImages.of(
        [
            [
                Image(data=data[number], frames=frames[number], places=tuple(at))
                for number, at in zip(numbers, places, strict=True)
            ]
            for numbers, places in rows
        ]
    )


def lists(values: Any, lengths: Any) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # Expert ids of long steps exceed 32-bit offsets.
    large = offsets[-1] > MOST_IN_LISTS
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(pa.array(offsets if large else offsets.astype(np.int32)), pa.array(values))


def flat(column: pa.ChunkedArray) -> Any:
    whole = column.combine_chunks()
    values = whole.flatten() if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type) else whole
    return values.to_numpy(zero_copy_only=False)
