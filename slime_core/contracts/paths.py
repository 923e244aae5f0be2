"""RunPath: a path in a run file is relative to that file; a path in a flag is relative to the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, ValidationInfo


class FlagText(str):
    """Text that came from the command line."""

    __slots__ = ()


def anchor(value: object, info: ValidationInfo) -> object:
    """Joins a relative path to its base; text, so that a slice (`path@[0:10]`) is kept."""
    if not isinstance(value, (str, Path)):
        return value
    base = Path.cwd() if isinstance(value, FlagText) else (info.context or {}).get("base")
    return str(value) if base is None else str(Path(base) / Path(value).expanduser())


RunPath: TypeAlias = Annotated[str, BeforeValidator(anchor)]
"""Absolute once validated."""
