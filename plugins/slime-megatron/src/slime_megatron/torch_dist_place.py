"""Where the newest torch_dist state of a folder is. Nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from slime_core.errors import CheckpointError

METADATA: Final = ".metadata"
STATE: Final = "state"
"""Folder of the state in a training checkpoint of this backend."""
NEWEST: Final = "latest_checkpointed_iteration.txt"
"""File of Megatron's own training: the number of its newest checkpoint, or `release` for one that was not trained."""


def torch_dist_place(folder: Path) -> Path | None:
    """The state itself, that of a training checkpoint, or the newest of Megatron's. None: there is none. Raises
    CheckpointError if the newest is not there."""
    for place in (folder, folder / STATE):
        if (place / METADATA).is_file():
            return place
    file = folder / NEWEST
    if not file.is_file():
        return None
    number = file.read_text(encoding="utf-8").strip()
    place = folder / (f"iter_{int(number):07d}" if number.isdecimal() else number)
    if not (place / METADATA).is_file():
        raise CheckpointError(
            f"{file}: it names {place.name}, and {place}/{METADATA} does not exist. Only checkpoints in Megatron's format "
            "torch_dist can be read."
        )
    return place
