"""Requests with images, as SGLang takes them: each image's token once, which it repeats for the features itself.

It keeps the other token ids as they are (`SGLANG_MM_AVOID_RETOKENIZE`, on by default), and finds an image's place by its
token. So a token of that kind that the model wrote itself cannot be sent back beside images.
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
"""Of config.json."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    image: int
    all: frozenset[int]
    """Every token that SGLang takes for the place of something that is not text."""

    @classmethod
    def of(cls, model_path: Path) -> ImageTokens | None:
        """None for a model of text alone, and for a folder without config.json, of which the server tells."""
        path = model_path / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        if "vision_config" not in config or config.get(KEYS[0]) is None:
            return None
        return cls(int(config[KEYS[0]]), frozenset(int(config[key]) for key in KEYS if config.get(key) is not None))

    def collapsed(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Each run of image tokens as one."""
        is_image = token_ids == self.image
        again = np.concatenate([[False], is_image[1:] & is_image[:-1]])
        return token_ids[~again]

    def problem(self, request: GenerateRequest) -> str | None:
        """Why a request cannot be sent as it is."""
        places = np.isin(self.collapsed(request.token_ids), list(self.all)).sum()
        if not request.images or places == len(request.images):
            return None
        return (
            f"request {request.request_id} has {len(request.images)} images, and {places} places for them in its tokens. "
            "SGLang cannot tell an image's token from one that the model has written"
        )

    def first_in(self, token_ids: Sequence[int]) -> int:
        """How many tokens can be sent back beside images."""
        return next((place for place, token in enumerate(token_ids) if token in self.all), len(token_ids))


def encoded(images: Sequence[Image]) -> list[str]:
    """For `image_data`."""
    return [f"data:image;base64,{base64.b64encode(image.data).decode()}" for image in images]
