"""A Qwen3-VL of some ten thousand random parameters, small images for it, and what transformers alone makes of them.

Legend: R response tokens of one sequence.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from slime_core.algorithm.build_batch import build_batch
from slime_core.types.batch import Batch
from slime_core.types.image import Image
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_models.media.image_processor import ImageProcessor, Pixels
from slime_models.media.video_reader import VideoReader
from slime_models.new_model import ModelSizes
from slime_models.new_vision_model import VisionSizes, new_vision_model
from slime_plugin_kit.tiny_model import ALPHABET

MAX_LENGTH: Final = 256
IMAGE_TOKEN: Final = 4
"""Id of the image token of the tiny model."""


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


def image_prompt(processor: ImageProcessor, group_index: int, *parts: int | Image) -> Prompt:
    """Token ids and images in a row."""
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, Image):
            tokens += [2, *[processor.token_id] * processor.num_tokens(part), 3]
        else:
            tokens.append(part)
    images = tuple(part for part in parts if isinstance(part, Image))
    return Prompt(group_index=group_index, text="", token_ids=np.array(tokens, np.int32), images=images)


def video_prompt(folder: Path, processor: ImageProcessor, group_index: int, *parts: int | Sequence[Image]) -> Prompt:
    """Token ids and videos in a row; a video is a list of pictures. A token of text is between each two frames."""
    reader = VideoReader(folder, processor)
    tokens: list[int] = []
    videos = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        video = reader.read_frames([frame.data for frame in part], "a test")
        count, places = processor.num_tokens(video), []
        for number in range(video.num_places):
            places.append(len(tokens) + 2)
            tokens += [7 + number, 2, *[processor.video_token_id] * (count // video.num_places), 3]
        videos.append(replace(video, places=tuple(places), num_tokens=count))
    return Prompt(group_index=group_index, text="", token_ids=np.array(tokens, np.int32), images=tuple(videos))


def image_samples(processor: ImageProcessor) -> list[Sample]:
    """Responses to four prompts: equal tokens under two images, two images in one prompt, and none; an empty response, one
    without a trained token, and image tokens that the model wrote."""
    first, second, third, fourth = noise(8, 8, 0), noise(20, 9, 1), noise(11, 23, 2), noise(8, 8, 3)
    one = image_prompt(processor, 0, 9, 10, first, 11)
    other = image_prompt(processor, 1, 9, 10, fourth, 11)
    two = image_prompt(processor, 2, second, 12, third, 13, 14)
    text = image_prompt(processor, 3, 15, 16, 17)
    responses = [
        (one, [12, 13, 14]),
        (one, [12, 15, IMAGE_TOKEN, 16, 17]),
        (one, []),
        (other, [12, 13, 14]),
        (other, [20]),
        (two, [21, 22, 9, 10]),
        (two, [21, 23]),
        (text, [9, IMAGE_TOKEN, 10]),
    ]
    return [
        image_sample(prompt, index, response, trained=index != 5) for index, (prompt, response) in enumerate(responses)
    ]


def image_sample(prompt: Prompt, index: int, response: Sequence[int], *, trained: bool = True) -> Sample:
    return Sample(
        index=index,
        group_index=prompt.group_index,
        rollout_id=index,
        prompt=prompt,
        tokens=np.concatenate([prompt.token_ids, np.array(response, np.int32)]),
        prompt_length=len(prompt.token_ids),
        loss_mask=np.full(len(response), trained, np.uint8),
        rollout_log_probs=np.zeros(len(response), np.float32),
        reward=1.0,
    )


def image_batch(samples: Sequence[Sample]) -> Batch:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    return build_batch([SampleGroup(prompt=group[0].prompt, samples=tuple(group)) for group in groups.values()])


def load_plain_vision(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """With transformers, and nothing of ours."""
    from transformers import AutoModelForImageTextToText
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def with_stand_in(model: Any, token: int | None = None) -> Any:
    """The same object with one more row of embeddings: transformers takes every image token for an image's feature, so
    one that the model wrote itself is fed as this token. `token`: stands in for this one."""
    embedding = model.get_input_embeddings()
    image = int(model.config.image_token_id) if token is None else token
    with torch.no_grad():
        embedding.weight = torch.nn.Parameter(torch.cat([embedding.weight, embedding.weight[image : image + 1]]))
    return model


def image_log_probs_of(model: Any, pixels: Sequence[Pixels], prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """(R,) log-probs of the response tokens, by a model `with_stand_in`, one sequence alone; with gradient, if it is on."""
    rows = image_logits_of(model, pixels, prompt, response).log_softmax(-1)
    chosen: Tensor = rows.gather(1, torch.tensor(list(response), dtype=torch.int64)[:, None])[:, 0]
    return chosen


def video_log_probs_of(
    model: Any, pixel_values: Any, grid_thw: Any, prompt: Sequence[int], response: Sequence[int]
) -> Tensor:
    """(R,) log-probs as `image_log_probs_of`, for a prompt with videos; the model sees another token id at their places."""
    video, last = int(model.config.video_token_id), len(model.get_input_embeddings().weight) - 1
    tokens = torch.tensor([[*map(int, prompt), *(last if token == video else int(token) for token in response)]])
    model.model.rope_deltas = None
    rows = model(
        input_ids=tokens,
        use_cache=False,
        pixel_values_videos=torch.as_tensor(pixel_values).to(model.dtype),
        video_grid_thw=torch.as_tensor(grid_thw),
        mm_token_type_ids=2 * (tokens == video).long(),
    ).logits[0]
    rows = rows[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
    chosen: Tensor = rows.gather(1, torch.tensor(list(response), dtype=torch.int64)[:, None])[:, 0]
    return chosen


def image_logits_of(model: Any, pixels: Sequence[Pixels], prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """(R, outputs of the head) at the tokens that predict the response, as `image_log_probs_of`."""
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
    rows: Tensor = model(input_ids=tokens, use_cache=False, **extra).logits[0]
    return rows[len(prompt) - 1 : len(prompt) + len(response) - 1]
