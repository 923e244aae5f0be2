"""Images in the packed forward of Qwen3-VL: positions in three directions, and features at the positions of image tokens.

The features of the vision tower replace the embeddings of a prompt's image tokens, and those of some of its inner layers
are added to the first layers of the language model there (DeepStack, arXiv:2406.04334).

Legend: N tokens of the stream, F features of all images, P patches, H hidden size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from slime_core.types.microbatch import MicroBatch, MicroImages


def rope_positions(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """(4, N) int64: position in the sequence, then time, row and column of each token (Qwen2-VL, arXiv:2409.12191, section
    2.1): text continues behind the longest side of an image. Uses the model's own rule, on the CPU, before the stream is
    shortened or split."""
    images = micro.images
    if images is None:
        return micro.position_ids.expand(4, -1)
    starts = feature_starts(model, images)
    positions = micro.position_ids.expand(4, -1).clone()
    offsets = micro.cu_seqlens.tolist()
    for start, end in pairwise(offsets):
        of_token = images.feature_of_token[start:end].numpy()
        seen = images_at(of_token, starts)
        if len(seen):
            found, _ = model.base_model.get_rope_index(
                input_ids=micro.tokens[None, start:end],
                mm_token_type_ids=torch.from_numpy((of_token >= 0).astype(np.int64))[None],
                image_grid_thw=images.grid_thw[torch.from_numpy(seen)],
            )
            positions[1:, start:end] = found[:, 0]
    return positions


def feature_starts(model: PreTrainedModel, images: MicroImages) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(images + 1,) offset of each image's features among the F."""
    merge = int(model.config.vision_config.spatial_merge_size) ** 2
    counts = images.grid_thw.prod(-1).numpy() // merge
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def images_at(of_token: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The image at each place of a sequence, in order: a place begins at an image's first feature."""
    first = of_token[np.isin(of_token, starts[:-1])]
    return np.searchsorted(starts, first)


def held_images(model: PreTrainedModel, images: MicroImages) -> MicroImages | None:
    """The images that this rank's tokens show, after a sequence was split: features of the others are computed by another rank.
    None: there are none."""
    starts = torch.from_numpy(feature_starts(model, images))
    is_image = images.feature_of_token >= 0
    of_token = torch.searchsorted(starts, images.feature_of_token[is_image], right=True) - 1
    seen, number = torch.unique(of_token, return_inverse=True)
    if not len(seen):
        return None
    counts = starts.diff()[seen]
    moved = counts.cumsum(0) - counts - starts[seen]
    feature_of_token = images.feature_of_token.clone()
    feature_of_token[is_image] += moved[number]
    patches = images.grid_thw.prod(-1).tolist()
    pixels = images.pixel_values.split(patches)
    return MicroImages(
        pixel_values=torch.cat([pixels[image] for image in seen.tolist()]),
        grid_thw=images.grid_thw[seen],
        feature_of_token=feature_of_token,
    )


def hidden_states(model: PreTrainedModel, micro: MicroBatch, positions: Tensor, attention: dict[str, Any]) -> Tensor:
    """(N, H) after the last norm. `positions` (4, N)."""
    base = model.base_model
    embeddings = base.get_input_embeddings()(micro.tokens)
    images = micro.images or no_image(model, micro.tokens)
    output = base.get_image_features(images.pixel_values, images.grid_thw, return_dict=True)
    features = torch.cat(output.pooler_output).to(embeddings.dtype)
    is_image = images.feature_of_token >= 0
    rows = images.feature_of_token[is_image]
    # Adding zeros keeps the vision tower in the graph if no token shows its output: all ranks gather its shards.
    nothing = sum(
        (part.sum() * 0 for part in (features, *output.deepstack_features)), torch.zeros((), device=rows.device)
    )
    embeddings = embeddings.index_put((is_image.nonzero()[:, 0],), features[rows]) + nothing.to(embeddings.dtype)
    hidden: Tensor = base.language_model(
        inputs_embeds=embeddings[None],
        position_ids=positions[:, None],
        use_cache=False,
        visual_pos_masks=is_image[None],
        deepstack_visual_embeds=[layer[rows] for layer in output.deepstack_features],
        **attention,
    ).last_hidden_state[0]
    return hidden


def no_image(model: PreTrainedModel, tokens: Tensor) -> MicroImages:
    """Zeros for one feature, which belongs to no token."""
    vision = model.config.vision_config
    side = int(vision.spatial_merge_size)
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return MicroImages(
        pixel_values=torch.zeros((side * side, width), device=tokens.device),
        grid_thw=torch.tensor([[1, side, side]], device=tokens.device),
        feature_of_token=torch.full_like(tokens, -1),
    )
