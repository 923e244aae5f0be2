"""A folder as `slime convert` writes it, made in this process: the kernel's worker processes and journal are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_core import groups
from slime_core.config.part import PluginSpec
from slime_core.registry import Registry


def converted_folder(source: Path, target: Path, name: str, **options: Any) -> Path:
    """`target`: what converter `name` makes of `source`, a folder with one file of weights; AssertionError if that reads back
    otherwise than it was written."""
    converter = PluginSpec(group=groups.CONVERTERS, name=name, options=options).resolve(Registry()).build()
    (piece,) = converter.pieces(source)
    parts = target.with_name(f"{target.name}.parts")
    parts.mkdir()
    target.mkdir()
    written = converter.write(source, piece, parts)
    converter.finish(source, {piece.name: parts}, target)
    assert converter.read_back(source, piece, target) == written
    return target
