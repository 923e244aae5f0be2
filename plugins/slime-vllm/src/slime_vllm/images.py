"""SentImages: images of requests as vLLM's servers take them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final

from slime_core.contracts.setup import EngineSetup
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor
from slime_serving.image_tokens import ImageTokens, data_url

HELD: Final = 64
"""Encoded images that are kept: those of a group's samples are the same."""


class SentImages:
    """A server's transformers may resize by other code than the trainer's (torchvision's, Pillow's), which makes other pixels.
    So images are sent in the size that the vision tower gets."""

    def __init__(self, tokens: ImageTokens, model_path: Path, *, trust_remote_code: bool) -> None:
        self.tokens = tokens
        self._model_path = model_path
        self._trust_remote_code = trust_remote_code
        self._url = lru_cache(maxsize=HELD)(self._encode)

    @classmethod
    def of(cls, setup: EngineSetup) -> SentImages | None:
        """None for a text model."""
        tokens = ImageTokens.of(setup.model_path)
        return None if tokens is None else cls(tokens, setup.model_path, trust_remote_code=setup.trust_remote_code)

    @cached_property
    def _processor(self) -> ImageProcessor:
        """Loaded for the first image: runs without images need neither Pillow nor the processor's config."""
        return ImageProcessor(self._model_path, trust_remote_code=self._trust_remote_code)

    def _encode(self, image: Image) -> str:
        return data_url(self._processor.resized(image))

    def parts(self, images: Sequence[Image]) -> list[dict[str, str]]:
        """vLLM's `content_parts`."""
        return [{"type": "image_url", "url": self._url(image)} for image in images]
