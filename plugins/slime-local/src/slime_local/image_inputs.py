"""Images of a Qwen3-VL request: pixels, where their features go, and positions in three directions.

Legend: P tokens of the prompt, K of them image tokens, B sequences, W columns (padded on the left), H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from slime_core.errors import EngineRefused
from slime_core.types.completion import GenerateRequest
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor

MODEL_TYPES: Final = frozenset({"qwen3_vl"})
"""`model_type` in config.json of the models that take images."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class ImageInputs:
    """What the images of one prompt are to the model."""

    pixel_values: Tensor
    """(patches, values of a patch) float32, on the device."""
    grid_thw: Tensor
    """(images, 3) int64"""
    places: Tensor
    """(K,) int64 in the prompt."""
    positions: Tensor
    """(3, P) int64: time, row and column (Qwen2-VL, arXiv:2409.12191, section 2.1)."""

    @property
    def delta(self) -> int:
        """What a later token's position has beyond its place: an image takes up less than its tokens."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]

    def positions_of(self, length: int) -> Tensor:
        """(3, length) of the prompt and what follows it."""
        prompt = self.positions.shape[1]
        after = torch.arange(prompt, length, device=self.positions.device) + self.delta
        return torch.cat([self.positions, after.expand(3, -1)], dim=1)


def pictures_of(network: PreTrainedModel, processor: ImageProcessor, request: GenerateRequest) -> ImageInputs:
    """EngineRefused if there are fewer image tokens than features. The first of them are the prompt's; later ones,
    which the model has written, have no features."""
    pixels = [processor.pixels(image) for image in request.images]
    tokens = torch.from_numpy(request.token_ids.astype(np.int64))[None]
    features = sum(image.num_tokens for image in pixels)
    if all(image.places for image in request.images):
        placed = zip(request.images, pixels, strict=True)
        places = torch.cat([feature_places(image, one.num_tokens) for image, one in placed])
        shown = torch.tensor([processor.token_of(image) for image in request.images])
        expected = shown.repeat_interleave(torch.tensor([image.num_tokens for image in pixels]))
        places = places[(places < tokens.shape[1]) & (tokens[0, places.clamp(max=tokens.shape[1] - 1)] == expected)]
    else:
        places = (tokens[0] == processor.token_id).nonzero()[:features, 0]
    if len(places) != features:
        raise EngineRefused(
            f"request {request.request_id}: its prompt has {len(places)} image tokens, and its images have {features} "
            "features: they were rendered with another image processor than this model's."
        )
    is_image = torch.zeros_like(tokens)
    is_image[0, places] = 1
    grids = torch.from_numpy(np.concatenate([image.grids for image in pixels]))
    positions, _ = network.model.get_rope_index(tokens, mm_token_type_ids=is_image, image_grid_thw=grids)
    device = network.device
    return ImageInputs(
        pixel_values=torch.from_numpy(np.concatenate([image.values for image in pixels])).to(device),
        grid_thw=grids.to(device),
        places=places.to(device),
        positions=positions[:, 0].to(device),
    )


def feature_places(image: Image, num_tokens: int) -> Tensor:
    """(features,) int64: the position of each of an image's features. Each of its places has an equal share of them."""
    starts = torch.tensor(image.places)
    return (starts[:, None] + torch.arange(num_tokens // len(starts))).reshape(-1)


def prefill_logits(
    network: Any,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    mask: Tensor | None,
    cache: Cache,
    pictures: Sequence[ImageInputs | None],
) -> Tensor:
    """(B, V) of the last column. `ids`, `positions` (B, W), as for a prompt of text; `pictures` by sequence."""
    base = network.model
    shown = [(row, picture) for row, picture in enumerate(pictures) if picture is not None]
    embeddings = base.get_input_embeddings()(ids)
    width = ids.shape[1]
    directions = positions.expand(3, -1, -1).clone()
    rows, columns = [], []
    for row, picture in shown:
        length = int(lengths[row])
        directions[:, row, width - length :] = picture.positions_of(length)
        rows.append(torch.full_like(picture.places, row))
        columns.append(picture.places + width - length)
    where = (torch.cat(rows), torch.cat(columns))
    output = base.get_image_features(
        torch.cat([picture.pixel_values for _, picture in shown]),
        torch.cat([picture.grid_thw for _, picture in shown]),
        return_dict=True,
    )
    embeddings[where] = torch.cat(output.pooler_output).to(embeddings.dtype)
    is_image = torch.zeros_like(ids, dtype=torch.bool)
    is_image[where] = True
    hidden = base.language_model(
        inputs_embeds=embeddings,
        position_ids=directions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        visual_pos_masks=is_image,
        deepstack_visual_embeds=output.deepstack_features,
    ).last_hidden_state[:, -1]
    logits: Tensor = network.lm_head(hidden).float()
    return logits
