"""QwenVl: what makes prompts and pixels for models of the Qwen-VL family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.contracts.media import Media
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_models.media.renderer import QwenVlRenderer
from slime_models.media.video_reader import VideoReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class QwenVl(Media):
    """Columns are those of the modalities `image` and `video`, which share the model folder's image processor."""

    def renderer(
        self, folder: Path, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, str], *, trust_remote_code: bool
    ) -> QwenVlRenderer:
        images = ImageProcessor(folder, trust_remote_code=trust_remote_code)
        return QwenVlRenderer(
            tokenizer,
            images,
            image_key=columns.get("image"),
            video_key=columns.get("video"),
            videos=VideoReader(folder, images) if "video" in columns else None,
        )

    def packer(self, folder: Path, *, trust_remote_code: bool) -> PixelCache:
        return PixelCache(lambda: ImageProcessor(folder, trust_remote_code=trust_remote_code))
