"""Small Qwen3-VL models with random weights, a character tokenizer and an image processor: `new_model` for images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slime_core.errors import ModelError
from slime_models.new_model import ModelSizes, character_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLConfig

IMAGE: Final = "<|image_pad|>"
VIDEO: Final = "<|video_pad|>"
START: Final = "<|vision_start|>"
END: Final = "<|vision_end|>"
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% endfor %}"
)
"""The contents alone, one after the other; images and videos as the family writes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSizes:
    """The numbers that make a vision tower small."""

    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 2
    intermediate_size: int = 64
    patch_size: int = 8
    """Pixels; four patches are one token of the language model."""
    deepstack_layers: tuple[int, ...] = (0, 1)
    """Layers whose features are added to the first layers of the language model as well."""
    max_pixels: int = 64 * 64
    """A larger image is made smaller, and a video whose frames have more than eight times as many together."""


def new_vision_model(
    folder: Path,
    sizes: ModelSizes,
    vision: VisionSizes,
    *,
    alphabet: str,
    tokens: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
    seed: int = 0,
    initializer_range: float = 0.02,
) -> int:
    """Writes config, weights (float32), tokenizer and image processor into `folder`; returns the parameter count.

    ModelError if the folder exists.
    """
    import torch
    from transformers import Qwen3VLForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    if folder.exists():
        raise ModelError(f"{folder}: exists already. Remove it, or give another name.")
    tokenizer = character_tokenizer(alphabet, [IMAGE, VIDEO, START, END, *tokens])
    tokenizer.chat_template = chat_template
    config = vision_config(sizes, vision, tokenizer, initializer_range)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_processors(folder, vision)
    return int(model.num_parameters())


def vision_config(
    sizes: ModelSizes, vision: VisionSizes, tokenizer: PreTrainedTokenizerFast, initializer_range: float
) -> Qwen3VLConfig:
    """The sizes as transformers' config of a Qwen3-VL, with the token ids of `tokenizer`."""
    from transformers import Qwen3VLConfig

    head_dim = sizes.hidden_size // sizes.num_heads
    # Frequencies are dealt out to time, height and width in turn; the rest is time's.
    section = head_dim // 6
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": sizes.hidden_size,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": head_dim,
            "intermediate_size": sizes.intermediate_size,
            "max_position_embeddings": sizes.max_length,
            "initializer_range": initializer_range,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [head_dim // 2 - 2 * section, section, section],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "patch_size": vision.patch_size,
            "out_hidden_size": sizes.hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
            "initializer_range": initializer_range,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=sizes.tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def save_processors(folder: Path, vision: VisionSizes) -> None:
    """Writes the configs of the image and video processors: patches of two frames, four of which are a token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    for processor, max_pixels in (
        (Qwen2VLImageProcessorPil, vision.max_pixels),
        (Qwen3VLVideoProcessor, 8 * vision.max_pixels),
    ):
        processor(
            patch_size=vision.patch_size,
            temporal_patch_size=2,
            merge_size=2,
            size={"shortest_edge": (2 * vision.patch_size) ** 2, "longest_edge": max_pixels},
            image_mean=[0.5, 0.5, 0.5],
            image_std=[0.5, 0.5, 0.5],
        ).save_pretrained(folder)
