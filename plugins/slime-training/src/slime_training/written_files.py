"""Sizes of the files of a checkpoint, to detect a truncated file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from slime_core.errors import CheckpointError


def sizes_of(folder: Path, files: Iterable[Path]) -> dict[str, int]:
    """Bytes of each file, by its path in the folder."""
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def check_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raises CheckpointError with the file's name unless all files exist with their sizes."""
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; the checkpoint is incomplete.")
        if (found := file.stat().st_size) != size:
            raise CheckpointError(f"{file}: {found} bytes where {size} were written; the checkpoint is truncated.")
