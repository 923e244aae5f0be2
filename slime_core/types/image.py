"""Image: one picture or video of a prompt, encoded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Bytes of an upright image file that decodes. Pixels are computed from them where they are needed.

    A video is one image of all its frames, one below the other; each two frames have one place in the tokens.
    """

    data: bytes = field(repr=False)
    name: str = ""
    """File or row that it was read from, for messages."""
    places: tuple[int, ...] = ()
    """Token positions where its features begin, each with an equal part; empty: at the prompt's image tokens."""
    num_tokens: int = 0
    """Features; 0: not counted yet."""
    frames: int = 0
    """Frames of a video, an even number; 0: a picture."""
    seconds: tuple[float, ...] = ()
    """Time of each two frames of a video, in seconds."""

    @property
    def num_places(self) -> int:
        return max(1, self.frames // 2)
