"""Where the features of images and videos stand in text and tokens, as models of the Qwen-VL family have learnt it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from slime_core.errors import DataError
from slime_core.types.image import Image

TokenIds: TypeAlias = npt.NDArray[np.int32]
VIDEO_MARK: Final = "<|vision_start|><|video_pad|><|vision_end|>"
"""What their templates write for a video."""


def with_features(
    token_ids: TokenIds, is_place: npt.NDArray[np.bool_], images: Sequence[Image]
) -> tuple[TokenIds, tuple[Image, ...]]:
    """The ids with the token at each place, `Image.num_places` of an image, repeated for each feature; and the images with
    their places in these ids."""
    repeats = np.ones(len(token_ids), np.int64)
    repeats[is_place] = [image.num_tokens // image.num_places for image in images for _ in range(image.num_places)]
    starts = iter((np.cumsum(repeats) - repeats)[is_place].tolist())
    placed = tuple(replace(image, places=tuple(islice(starts, image.num_places))) for image in images)
    return np.repeat(token_ids, repeats), placed


def with_times(text: str, videos: Sequence[Image], origin: str) -> str:
    """Each video's mark in the text once for every two frames, with their time before it, as models of the Qwen3-VL family
    have learnt it."""
    pieces = text.split(VIDEO_MARK)
    if len(pieces) - 1 != len(videos):
        raise DataError(
            f"{origin}: {len(videos)} videos, and {len(pieces) - 1} times {VIDEO_MARK} in the prompt: the template, or the "
            "prompt where there is none, must write it once for each video"
        )
    return pieces[0] + "".join(timed_mark(video) + piece for video, piece in zip(videos, pieces[1:], strict=True))


def timed_mark(video: Image) -> str:
    """The text that is put in for a video."""
    return "".join(f"<{second:.1f} seconds>{VIDEO_MARK}" for second in video.seconds)
