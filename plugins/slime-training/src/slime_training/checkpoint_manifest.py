"""Manifest: the description of a backend's checkpoint, in a file that is written after all others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Manifest:
    format: int
    """Version of the backend's checkpoint format."""
    steps_done: int
    world_size: int
    copies: Sequence[str]
    """Frozen models that were updated from the trained weights, so that their folder no longer holds them. The field keeps its
    name of 0.1, since it is a key of the file."""
    shapes: Mapping[str, Any]
    """What a resumed run must have too, as JSON: by name, the shape of a tensor or an option of the model."""
    sizes: Mapping[str, int]
    """Bytes of every other file."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, file: Path, *, backend: str, expected_format: int) -> Manifest:
        """Reads a manifest. CheckpointError with the file's name unless it exists and is a manifest of this backend and format.
        Its content is not compared with the model here."""
        if not file.is_file():
            raise CheckpointError(
                f"{file}: no such file; the checkpoint is incomplete or not one of backend {backend}."
            )
        try:
            manifest = cls(**json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        if manifest.format != expected_format:
            raise CheckpointError(f"{file}: format {manifest.format}; this version reads {expected_format}.")
        return manifest
