"""ImageTokens: converts requests with images to the form of serving programs: each image's token once, which the program
repeats per feature.

Programs find the position of an image by its token. So an image token that the model generated cannot be sent back together
with images.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from slime_core.errors import EngineRefused
from slime_core.types.completion import GenerateRequest

KEYS: Final = ("image_token_id", "video_token_id")
"""Keys of config.json."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    image: int
    all: frozenset[int]
    """All tokens that mark the position of an image or a video."""

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
        kept: npt.NDArray[np.int32] = token_ids[~again]
        return kept

    def problem(self, request: GenerateRequest) -> str | None:
        """Why a request cannot be sent; None if it can."""
        places = np.isin(self.collapsed(request.token_ids), list(self.all)).sum()
        if not request.images or places == len(request.images):
            return None
        return (
            f"request {request.request_id} has {len(request.images)} images, but {places} places for them in its tokens. "
            "Servers cannot distinguish an image's token from one that the model generated"
        )

    def first_in(self, token_ids: npt.NDArray[np.int32]) -> int:
        """Number of leading tokens that can be sent back together with images."""
        places = np.flatnonzero(np.isin(token_ids, tuple(self.all)))
        return int(places[0]) if len(places) else len(token_ids)


def require_all_read(found: int, sent: int, request_id: str, server: str, advice: str) -> None:
    """Raises EngineRefused if the server read another number of tokens than the request has with its images' features."""
    if found != sent:
        raise EngineRefused(
            f"{server}: it read {found} tokens, but request {request_id} has {sent}: it computes other image features than the "
            f"run, or tokenizes the prompt again. {advice}"
        )


def data_url(content: bytes) -> str:
    """An image file in base64."""
    return f"data:image;base64,{base64.b64encode(content).decode()}"
