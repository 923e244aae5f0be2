"""Image: one picture of a prompt, as it was encoded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The bytes of an image file that decodes, upright. Pixels are computed from them where they are needed."""

    data: bytes = field(repr=False)
    name: str = ""
    """Where it came from, for messages."""
