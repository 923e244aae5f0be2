"""Frozen copies of the trained weights, by name."""

from __future__ import annotations

from collections.abc import Collection

from slime_core.contracts.backend import ACTOR
from slime_core.errors import ModelError, unknown_name


def require_copy(name: str, copies: Collection[str]) -> None:
    """ModelError unless it is one of `copies`, those of the trainer."""
    if name not in copies:
        raise ModelError(unknown_name("weights", name, "copy of this trainer", [ACTOR, *copies]))
