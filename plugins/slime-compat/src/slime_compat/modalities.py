"""Names of modalities in messages, as old functions look them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass
class MultimodalType:
    name: str
    """Type of a part of a message, such as image."""
    placeholder: str
    """Its place in the text."""


class MultimodalTypes:
    IMAGE: Final = MultimodalType("image", "<image>")
    VIDEO: Final = MultimodalType("video", "<video>")
    AUDIO: Final = MultimodalType("audio", "<audio>")

    @classmethod
    def all(cls) -> list[MultimodalType]:
        return [cls.IMAGE, cls.VIDEO, cls.AUDIO]

    @classmethod
    def get(cls, name: str) -> MultimodalType | None:
        return next((kind for kind in cls.all() if kind.name == name), None)
