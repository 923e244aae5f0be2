"""Where a Hugging Face model folder has its config."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import ModelError


def config_file_of(folder: Path) -> Path:
    """ModelError unless it is there."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder. Give a Hugging Face model folder (config.json, *.safetensors).")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: it has no config.json, so it is not a Hugging Face model folder.")
    return file
