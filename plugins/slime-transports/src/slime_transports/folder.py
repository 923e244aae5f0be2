"""Folders of weights on disk, written atomically, with a checksum per bucket.

SGLang's processes import this module to read them, so it must stay small.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import xxhash
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.atomic_io.storage import is_full, storage_error
from slime_transports.flattened_bucket import FlattenedBucket, bytes_of, checksum

MANIFEST: Final = "slime_weights.json"
WRITING: Final = ".writing"
WRONG_BASE: Final = "a delta to other weights than are held"
"""Part of the message with which a server refuses a delta; nothing was changed."""
log = logging.getLogger(__name__)

READERS: Final = 4
"""Number of buckets that are read at the same time."""


class DamagedWeights(ValueError):
    """The content of the disk is not what was written."""


class FileEntry(BaseModel, frozen=True, extra="forbid"):
    """One bucket. `checksum` is xxh3-64 over its tensors' bytes in the order of `names`, or over the file of a delta."""

    file: str
    names: tuple[str, ...]
    checksum: str
    nbytes: int
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    crc32: int | None = None
    """Of the same bytes as `checksum`, for servers that have no xxh3 (`WeightReceiver.zlib`)."""
    parts: tuple[tuple[int, int], ...] = ()
    """For a delta, for each element width, widest first: compressed bytes of the positions, and of the values."""


class Manifest(BaseModel, frozen=True, extra="forbid"):
    version: int
    identity: str
    """Unique for the weights of each update."""
    base: str | None = None
    """Identity of the weights that this is a delta to; None: these are whole."""
    deltas_follow: bool = False
    """The next folder may be a delta to these weights, for servers that must keep them to apply it."""
    buckets: tuple[FileEntry, ...]


def write_whole(folder: Path, bucket: FlattenedBucket, *, crc32: bool) -> FileEntry:
    """Writes one safetensors file. `bucket`: on the host. Raises StorageError if the disk is full."""
    name = f"model-{bucket.index:05d}.safetensors"
    entry = FileEntry(
        file=name,
        names=bucket.names,
        checksum=checksum(bucket.data),
        nbytes=bucket.data.nbytes,
        crc32=zlib.crc32(bytes_of(bucket.data)) if crc32 else None,
    )
    try:
        save_file(dict(bucket.tensors()), folder / name, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) or is_full(folder / name, error):
            raise storage_error(folder / name, error) from error
        raise
    return entry


def write_bytes(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise storage_error(path, error) from error


def begin(folder: Path) -> Path:
    """Creates the temporary folder in which the content of `folder` is written."""
    beside = folder.with_name(folder.name + WRITING)
    try:
        remove(beside)
        beside.mkdir(parents=True)
    except OSError as error:
        raise storage_error(beside, error) from error
    return beside


def finish(beside: Path, manifest: Manifest) -> Path:
    """Renames the folder to its final name. Without fsync: after a crash of the machine all weights are sent again."""
    write_bytes(beside / MANIFEST, manifest.model_dump_json().encode())
    folder = beside.with_name(beside.name.removesuffix(WRITING))
    try:
        remove(folder)
        os.replace(beside, folder)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def clear(folder: Path) -> None:
    """Removes a folder as far as the file system allows. Left files only cost space: they must not end a run, nor hide why a
    weight update has failed. NFS keeps files that are still open."""
    try:
        remove(folder)
    except OSError as error:
        log.warning("%s: old weights could not be removed: %s", folder, error)


def clear_all_but(root: Path, kept: Sequence[Path]) -> None:
    try:
        folders = list(root.iterdir()) if root.exists() else []
    except OSError as error:
        log.warning("%s: old weights could not be removed: %s", root, error)
        return
    for folder in folders:
        if folder not in kept:
            clear(folder)


def read_manifest(folder: Path) -> Manifest:
    return Manifest.model_validate_json((folder / MANIFEST).read_bytes())


def verify_whole(folder: Path, manifest: Manifest) -> None:
    """Reads and verifies every file. Raises DamagedWeights with the bucket."""
    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(partial(verify, folder, manifest), range(len(manifest.buckets))))


def verify(folder: Path, manifest: Manifest, number: int) -> None:
    entry = manifest.buckets[number]
    where = f"bucket {number} of version {manifest.version} ({folder / entry.file})"
    digest = xxhash.xxh3_64()
    try:
        with safe_open(folder / entry.file, framework="pt") as file:
            unexpected = set(file.keys()) ^ set(entry.names)
            if unexpected:
                raise DamagedWeights(f"{where} is damaged: {len(unexpected)} tensors too many or missing")
            for name in entry.names:
                digest.update(bytes_of(file.get_tensor(name)))
    except (OSError, SafetensorError) as error:
        raise DamagedWeights(f"{where} cannot be read: {error}") from error
    if digest.hexdigest() != entry.checksum:
        raise DamagedWeights(
            f"{where} is damaged: checksum {entry.checksum} was written, its bytes have {digest.hexdigest()}"
        )
