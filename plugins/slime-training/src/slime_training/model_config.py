"""The config of a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core.errors import ModelError


def config_file_of(folder: Path) -> Path:
    """ModelError unless it is there."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder. Give a Hugging Face model folder (config.json, *.safetensors).")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder}: it has no config.json, so it is not a Hugging Face model folder.")
    return file


def with_rotated_share(config: Any) -> Any:
    """The same config of transformers. Released configs of MiniMax-M2 have the rotated features of a head as `rotary_dim`, and
    transformers 5.12 rotates all of them (huggingface/transformers issue 48241): it gets their share here."""
    if config.model_type == "minimax_m2" and (rotated := getattr(config, "rotary_dim", None)):
        config.rope_parameters.setdefault("partial_rotary_factor", rotated / config.head_dim)
    return config
