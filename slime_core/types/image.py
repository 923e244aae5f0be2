"""Image: one picture or video of a prompt, as it was encoded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The bytes of an image file that decodes, upright. Pixels are computed from them where they are needed.

    A video is one image of all its frames, one below the other, which two by two make a place in the tokens.
    """

    data: bytes = field(repr=False)
    name: str = ""
    """Where it came from, for messages."""
    places: tuple[int, ...] = ()
    """Where its features begin among the tokens of the sample, each place with an equal part of them; empty: at the image
    tokens of the prompt, in order."""
    num_tokens: int = 0
    """Features; 0: not counted yet."""
    frames: int = 0
    """Of a video, an even number; 0: a picture."""
    seconds: tuple[float, ...] = ()
    """Of a video: the time of each two frames."""

    @property
    def num_places(self) -> int:
        return max(1, self.frames // 2)
