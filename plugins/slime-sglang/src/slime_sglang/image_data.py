"""ImageTokens: converts requests with images to SGLang's form: each image's token once, which SGLang repeats per feature.

SGLang keeps the other token ids (`SGLANG_MM_AVOID_RETOKENIZE`, on by default), and finds the position of an image by its
token. So an image token that the model generated cannot be sent back together with images.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from slime_core.types.completion import GenerateRequest
from slime_core.types.image import Image

KEYS: Final = ("image_token_id", "video_token_id")
"""Keys of config.json."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    image: int
    all: frozenset[int]
    """All tokens that SGLang treats as the position of an image or a video."""

    @classmethod
    def of(cls, model_path: Path) -> ImageTokens | None:
        """None for a text model, and for a folder without config.json: then the server reports the model."""
        path = model_path / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        if "vision_config" not in config or config.get(KEYS[0]) is None:
            return None
        return cls(int(config[KEYS[0]]), frozenset(int(config[key]) for key in KEYS if config.get(key) is not None))

    def collapsed(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """`token_ids` with each run of image tokens replaced by one."""
        is_image = token_ids == self.image
        again = np.concatenate([[False], is_image[1:] & is_image[:-1]])
        return token_ids[~again]

    def problem(self, request: GenerateRequest) -> str | None:
        """Why a request cannot be sent; None if it can."""
        places = np.isin(self.collapsed(request.token_ids), list(self.all)).sum()
        if not request.images or places == len(request.images):
            return None
        return (
            f"request {request.request_id} has {len(request.images)} images, but {places} places for them in its tokens. "
            "SGLang cannot distinguish an image's token from one that the model generated"
        )

    def first_in(self, token_ids: npt.NDArray[np.int32]) -> int:
        """Number of leading tokens that can be sent back together with images."""
        places = np.flatnonzero(np.isin(token_ids, tuple(self.all)))
        return int(places[0]) if len(places) else len(token_ids)


def encoded(images: Sequence[Image]) -> list[str]:
    """The values of `image_data`: data URLs in base64."""
    return [f"data:image;base64,{base64.b64encode(image.data).decode()}" for image in images]
