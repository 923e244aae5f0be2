"""QwenVlRenderer: images and videos of rows in the messages, text and tokens of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.contracts.media import MediaRenderer
from slime_core.errors import DataError
from slime_core.types.image import Image
from slime_core.types.prompt import Message
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.row_images import Kind, row_images, row_videos, with_images
from slime_models.media.token_places import TokenIds, with_features, with_times
from slime_models.media.video_reader import VideoReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class QwenVlRenderer(MediaRenderer):
    """Images go where `<image>` is in the messages, or where the model's image token is in a whole prompt; in the
    token ids that token is repeated for each of an image's features. `Prompt.text` has it once. Videos go where `<video>` or
    the video token is, once for each two frames with their time before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageProcessor,
        *,
        image_key: str | None = None,
        video_key: str | None = None,
        videos: VideoReader | None = None,
    ) -> None:
        """Columns of the rows. `videos`: needed with a `video_key`."""
        self._tokenizer = tokenizer
        self._images = images
        self._image_key = image_key
        self._video_key = video_key
        self._videos = videos

    def read(self, row: Mapping[str, Any], origin: str, folder: Path | None) -> tuple[Image, ...]:
        pictures = () if self._image_key is None else row_images(row, self._image_key, origin, folder)
        if self._video_key is None or self._videos is None:
            return pictures
        return pictures + row_videos(row, self._video_key, origin, folder, self._videos)

    def place(self, messages: Sequence[Message], images: Sequence[Image], origin: str) -> list[Message]:
        clips = sum(image.frames > 0 for image in images)
        held: dict[Kind, int] = {}
        if self._image_key is not None:
            held["image"] = len(images) - clips
        if self._videos is not None:
            held["video"] = clips
        return with_images(messages, held, origin)

    def mark(self, text: str, images: Sequence[Image], origin: str) -> str:
        if self._videos is None:
            return text
        return with_times(text, [image for image in images if image.frames], origin)

    def expand(self, token_ids: TokenIds, images: Sequence[Image], origin: str) -> tuple[TokenIds, tuple[Image, ...]]:
        pictures = [image for image in images if not image.frames]
        kinds = [("image", pictures, self._images.token_id)]
        if self._videos is not None:
            kinds.append(("video", [image for image in images if image.frames], self._images.video_token_id))
        is_place = np.zeros(len(token_ids), np.bool_)
        found: list[tuple[int, Image]] = []
        for kind, shown, token_id in kinds:
            at = np.flatnonzero(token_ids == token_id)
            if len(at) != sum(one.num_places for one in shown):
                token = self._tokenizer.convert_ids_to_tokens(token_id)
                raise DataError(
                    f"{origin}: {len(shown)} {kind}s, and {len(at)} times {token} in the prompt: the template, or the "
                    f"prompt where there is none, must write it once for each {kind}"
                )
            is_place[at] = True
            first = np.cumsum([0, *(one.num_places for one in shown)])
            found += [(int(at[number]), one) for number, one in zip(first, shown, strict=False)]
        ordered = [one for _, one in sorted(found, key=lambda it: it[0])]
        counted = [replace(image, num_tokens=self._images.num_tokens(image)) for image in ordered]
        return with_features(token_ids, is_place, counted)
