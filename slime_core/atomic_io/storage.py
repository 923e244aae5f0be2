"""StorageError for full or unwritable disks, with the same message everywhere."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slime_core.errors import StorageError

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
SMALLEST: Final = 2**20
"""Bytes that a start requires on the disk."""


def storage_error(path: Path, error: BaseException) -> StorageError:
    """Error for a failed write of `path`."""
    if is_full(path, error):
        return StorageError(
            f"{path}: no space left to write it ({free_bytes(path) / 2**20:.1f} MiB free). What was saved before is "
            "untouched: free some space and start the same command again to continue, or pass --runs-dir for another disk."
        )
    return StorageError(f"{path}: cannot be written: {error}. Fix that, or pass --runs-dir for another folder.")


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Raises StorageError for every OSError while `path` is written: a full or read-only disk, a lost file server."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Raises StorageError for a full disk; other OSErrors are unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise storage_error(Path(error.filename or folder), error) from error


def is_full(path: Path, error: BaseException) -> bool:
    """Checks the error or, if a library reports only that a write failed, the free space of the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return free_bytes(path) < 2**16 or "No space left on device" in str(error)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free


def check_writable(folder: Path) -> None:
    """StorageError if the folder could not be made or written; changes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        found = "is read-only for this user" if there.is_dir() else "is a file"
        raise StorageError(f"{folder}: cannot be written: {there} {found}. Pass --runs-dir for another place.")
    if free_bytes(there) < SMALLEST:
        raise storage_error(folder, OSError(errno.ENOSPC, "full"))
