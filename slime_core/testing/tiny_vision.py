"""A Qwen3-VL of some ten thousand random parameters, small images for it, and what transformers alone makes of them.

Legend: R response tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slime_core.image_processor import Pixels
from slime_core.new_model import ModelSizes
from slime_core.new_vision_model import VisionSizes, new_vision_model
from slime_core.testing.tiny_model import ALPHABET
from slime_core.types.image import Image

MAX_LENGTH: Final = 256


def make_tiny_vision_model(folder: Path) -> Path:
    """Weights far from zero, so that a wrong attention, position or feature shows."""
    new_vision_model(
        folder,
        ModelSizes(
            hidden_size=24, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=32, max_length=MAX_LENGTH
        ),
        VisionSizes(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, patch_size=4, max_pixels=24 * 24),
        alphabet=ALPHABET,
        seed=3,
        initializer_range=0.3,
    )
    return folder


def noise(width: int, height: int, seed: int) -> Image:
    """A PNG of random pixels."""
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format="PNG")
    return Image(data=file.getvalue(), name=f"noise {seed}")


def load_plain_vision(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """With transformers, and nothing of ours."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def with_stand_in(model: Any) -> Any:
    """The same object with one more row of embeddings: transformers takes every image token for an image's feature, so
    one that the model wrote itself is fed as this token."""
    embedding = model.get_input_embeddings()
    image = int(model.config.image_token_id)
    with torch.no_grad():
        embedding.weight = torch.nn.Parameter(torch.cat([embedding.weight, embedding.weight[image : image + 1]]))
    return model


def image_log_probs_of(model: Any, pixels: Sequence[Pixels], prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """(R,) log-probs of the response tokens, by a model `with_stand_in`, one sequence alone; with gradient, if it is on."""
    embedding = model.get_input_embeddings()
    image = int(model.config.image_token_id)
    written = [len(embedding.weight) - 1 if token == image else int(token) for token in response]
    tokens = torch.tensor([[*map(int, prompt), *written]])
    extra = {}
    if pixels:
        extra = {
            "pixel_values": torch.from_numpy(np.concatenate([one.values for one in pixels])).to(embedding.weight.dtype),
            "image_grid_thw": torch.from_numpy(np.stack([one.grid_thw for one in pixels])),
            "mm_token_type_ids": (tokens == image).long(),
        }
    model.model.rope_deltas = None
    rows = model(input_ids=tokens, use_cache=False, **extra).logits[0].log_softmax(-1)
    rows = rows[len(prompt) - 1 : len(prompt) + len(response) - 1]
    chosen: Tensor = rows.gather(1, torch.tensor(list(response), dtype=torch.int64)[:, None])[:, 0]
    return chosen
