"""Atomic writes: a file is complete or does not exist."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from slime_core.atomic_io.storage import storage_error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a new file, syncs it and renames it to `path`. StorageError if that fails; `path` is then unchanged."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        # On a disk that cannot be written this fails too, and the first error has the reason.
        with contextlib.suppress(OSError):
            aside.unlink()


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def sync(path: Path) -> None:
    """Forces a file's (or a folder's) content to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
