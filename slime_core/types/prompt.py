"""Prompt: one row of the data, rendered to tokens; a group of samples responds to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.types.image import Image

Message: TypeAlias = Mapping[str, Any]
"""One chat message: `role`, `content` and other keys that the template reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One draw from a data source."""

    group_index: int
    """Number of the draw, over all epochs: the same row drawn again has another one."""
    text: str
    """The rendered prompt."""
    token_ids: npt.NDArray[np.int32]
    """(P,) tokens of `text`, P >= 1, that the engine continues."""
    label: Any = None
    """Value of the label column, for the reward; None: no label."""
    messages: Sequence[Message] | None = None
    """The chat before rendering; None: the row has plain text."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of the tools in the chat template; None: no tools."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Value of the metadata column, for generators, rewards and filters."""
    images: tuple[Image, ...] = ()
    """In the order of their places in `token_ids`, which have one image token per feature of an image."""
    origin: str = ""
    """File and row that it was read from, for messages."""
