"""A folder that is complete or as it was before."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` at the end. After an error, or a kill, that one is there as it
    was; a kill between two renames leaves it as `.NAME.old`. Raises OSError."""
    aside, old = folder.with_name(f".{folder.name}.writing"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
