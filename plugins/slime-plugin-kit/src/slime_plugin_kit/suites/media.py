"""Media, with a tiny Qwen3-VL: from rows to prompts and micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from slime_core.contracts.engine import Capability
from slime_core.contracts.media import Media
from slime_core.data.model_folder import load_tokenizer
from slime_core.errors import DataError
from slime_core.types.prompt import Prompt
from slime_plugin_kit.case import Case
from slime_plugin_kit.tiny_vision import image_batch, image_sample, make_tiny_vision_model, noise
from slime_sources.rendering.prompt_renderer import PromptRenderer

ORIGIN: Final = "train.jsonl, line 3"
COLUMN: Final = "seen"
PICTURE: Final = noise(16, 8, 0).data
DAMAGED: Final = PICTURE[:60]
TEXTS: Final = {Capability.IMAGES: "a<image>b", Capability.VIDEOS: "a<video>b"}
VALUES: Final[Mapping[Capability, Callable[[bytes], Any]]] = {
    Capability.IMAGES: lambda data: [data],
    Capability.VIDEOS: lambda data: [[PICTURE, data]],
}
"""What a column holds with this picture in it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("model") / "tiny")


def rendered(case: Case, model: Path, data: bytes | None = PICTURE) -> Prompt:
    """A row with this picture; None: one of text alone."""
    tokenizer = load_tokenizer(model, trust_remote_code=False)
    media: Media = case.build()
    renderer = PromptRenderer(
        tokenizer,
        media=media.renderer(model, tokenizer, {case.entry.name: COLUMN}, trust_remote_code=False),
        apply_chat_template=True,
        # The tiny tokenizer has no characters for a time stamp.
        max_unknown_share=1.0,
    )
    needs = case.driver.needs
    row = {"input": "ab"} if data is None else {"input": TEXTS[needs], COLUMN: VALUES[needs](data)}
    return renderer.render(row, group_index=0, origin=ORIGIN)


def rows_of(prompt: Prompt) -> list[int]:
    """Where features stand in its tokens, image after image."""
    return [
        place + number
        for image in prompt.images
        for place in image.places
        for number in range(image.num_tokens // image.num_places)
    ]


def test_it_declares_an_engine_capability(case: Case) -> None:
    needs = getattr(case.driver, "needs", None)
    assert isinstance(needs, Capability), f"needs is {needs!r}"


def test_an_image_has_its_places(case: Case, model: Path) -> None:
    prompt = rendered(case, model)
    (image,) = prompt.images
    assert image.num_tokens >= 1, "it has no features"
    assert len(image.places) == image.num_places, f"{len(image.places)} places, not {image.num_places}"
    rows = rows_of(prompt)
    assert len(rows) == image.num_tokens, f"{image.num_tokens} features have {len(rows)} places"
    assert prompt.token_ids.dtype == np.int32, f"token ids are {prompt.token_ids.dtype}, not int32"
    found = set(prompt.token_ids[rows].tolist())
    assert len(found) == 1, f"different tokens are at its places: {sorted(found)}"
    others = np.delete(prompt.token_ids, rows)
    assert not np.isin(others, list(found)).any(), "its token is at other places too"
    json.dumps(prompt.messages)


def test_pixels_fit_the_tokens(case: Case, model: Path) -> None:
    prompt = rendered(case, model)
    text = rendered(case, model, None)
    token = int(prompt.token_ids[rows_of(prompt)[0]])
    # The second response contains such a token, which has no features.
    samples = [image_sample(prompt, 0, [9, 10]), image_sample(prompt, 1, [token, 9]), image_sample(text, 2, [9])]
    packer = case.build().packer(model, trust_remote_code=False)
    batch = image_batch(samples)
    micro = packer.pack(batch, np.array([1, 2, 0]))
    assert micro is not None, "there are no pixels"
    starts = np.cumsum([0, len(samples[1].tokens), len(samples[2].tokens)])
    expected = np.full(sum(len(sample.tokens) for sample in samples), -1)
    for start in (starts[0], starts[2]):
        expected[start + np.array(rows_of(prompt))] = np.arange(len(rows_of(prompt)))
    np.testing.assert_array_equal(micro.feature_of_token.numpy(), expected)
    patches = int(micro.grid_thw.prod(dim=1).sum())
    assert len(micro.pixel_values) == patches, f"{len(micro.pixel_values)} patches, and a grid of {patches}"
    assert packer.pack(batch, np.array([2])) is None, "there are pixels where no sample has an image"


def test_rows_without_media_are_text(case: Case, model: Path) -> None:
    plain = PromptRenderer(load_tokenizer(model, trust_remote_code=False), apply_chat_template=True)
    expected = plain.render({"input": "ab"}, group_index=0, origin=ORIGIN)
    found = rendered(case, model, None)
    assert (found.text, found.token_ids.tolist()) == (expected.text, expected.token_ids.tolist())
    assert found.images == ()


def test_renders_the_same_twice(case: Case, model: Path) -> None:
    one, other = rendered(case, model), rendered(case, model)
    assert (one.text, one.token_ids.tolist(), one.images) == (other.text, other.token_ids.tolist(), other.images)


def test_damaged_media_are_an_error(case: Case, model: Path) -> None:
    with pytest.raises(DataError) as caught:
        rendered(case, model, DAMAGED)
    assert str(caught.value).startswith(f"{ORIGIN}: "), f"the message is: {caught.value}"
