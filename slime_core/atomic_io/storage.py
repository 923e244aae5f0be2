"""A disk that refuses: one text for it, wherever it was noticed."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slime_core.errors import StorageError

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


def storage_error(path: Path, error: BaseException) -> StorageError:
    """For what went wrong while `path` was written."""
    if is_full(path, error):
        return StorageError(
            f"{path}: no space left to write it ({free_bytes(path) / 2**20:.1f} MiB free). What was saved before is "
            "untouched: free some space and start the same command again to go on, or say --runs-dir for another disk."
        )
    return StorageError(f"{path}: cannot be written: {error}. Mend that, or say --runs-dir for another place.")


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """A full disk is a StorageError; every other OSError passes."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise storage_error(Path(error.filename or folder), error) from error


def is_full(path: Path, error: BaseException) -> bool:
    """Libraries that write files themselves often say only that a write failed: then the disk is asked."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL
    return free_bytes(path) < 2**16 or "No space left on device" in str(error)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(next(p for p in (path, *path.absolute().parents) if p.exists())).free
