"""Prompt: one row of the data, rendered to tokens, that a group of samples answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.types.image import Image

Message: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content` and whatever else the template reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One draw from a data source.

    `group_index` increases for ever: the same row drawn in a later epoch is another prompt draw.
    `token_ids` is int32, length at least 1: what the engine is given.
    """

    group_index: int
    text: str
    token_ids: npt.NDArray[np.int32]
    label: Any = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    """In the order of their places in `token_ids`, where an image token stands once for each of an image's features."""
    origin: str = ""
    """File and row it came from, for messages."""
