"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slime_core.atomic_io.storage import storage_error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a new file beside `path`, which then takes its name, on disk when this returns.

    StorageError if the file system refuses; what was at `path` is then still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(aside)
        _sync(aside)
        aside.replace(path)
        _sync(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
