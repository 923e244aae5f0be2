"""Folders of weights on disk, written whole or not at all, whose every bucket has a checksum.

The reader may be a process of SGLang's: only what is here is shared with it.
"""

from __future__ import annotations

import logging
import os
import shutil
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
from slime_sglang.transports.flat import FlatBucket, bytes_of, checksum

MANIFEST: Final = "slime_weights.json"
WRITING: Final = ".writing"
log = logging.getLogger(__name__)

READERS: Final = 4
"""Buckets that are read at the same time."""


class DamagedWeights(ValueError):
    """What is on disk is not what was written."""


class FileEntry(BaseModel, frozen=True, extra="forbid"):
    """One bucket. `checksum` is xxh3-64 over its tensors' bytes in the order of `names`, or over the file of a delta."""

    file: str
    names: tuple[str, ...]
    checksum: str
    nbytes: int
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    """Of a delta, for each width of elements, widest first: compressed bytes of the positions, and of the values."""


class Manifest(BaseModel, frozen=True, extra="forbid"):
    version: int
    identity: str
    """Of the weights; no other push has it."""
    base: str | None = None
    """Identity of the weights that this is a delta to; None: these are whole."""
    buckets: tuple[FileEntry, ...]


def write_whole(folder: Path, bucket: FlatBucket) -> FileEntry:
    """One safetensors file. `bucket` is on the host. StorageError if the disk is full."""
    name = f"model-{bucket.index:05d}.safetensors"
    entry = FileEntry(file=name, names=bucket.names, checksum=checksum(bucket.data), nbytes=bucket.data.nbytes)
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
    """Where to write what will be `folder`."""
    beside = folder.with_name(folder.name + WRITING)
    try:
        remove(beside)
        beside.mkdir(parents=True)
    except OSError as error:
        raise storage_error(beside, error) from error
    return beside


def finish(beside: Path, manifest: Manifest) -> Path:
    """Puts the folder under its name. Nothing is forced to the disk: after a crash of the machine all is sent anew."""
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
    """As far as the file system lets it: what stays costs room, and neither ends a run nor hides why a push has failed. NFS
    keeps what somebody still reads."""
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
    """Reads every file. DamagedWeights names the bucket."""
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
