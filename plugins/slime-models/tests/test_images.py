"""Images from rows to prompts, tables and batches."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.data.model_folder import load_tokenizer
from slime_core.data.table import read_groups, write_groups
from slime_core.data.train_data import read_train_data, write_train_data
from slime_core.errors import DataError, ModelError
from slime_core.types import Prompt, Sample, SampleGroup
from slime_core.types.batch import TokenColumns
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_models.media.qwen_vl import QwenVl
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_vision import make_tiny_vision_model, noise
from slime_sources.plugin import Files
from slime_sources.rendering.prompt_renderer import PromptRenderer

PAD = 4
SMALL, WIDE = noise(8, 8, 0), noise(32, 16, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def renderer(folder):
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    media = QwenVl().renderer(folder, tokenizer, {"image": "images"}, trust_remote_code=False)
    return PromptRenderer(tokenizer, media=media, apply_chat_template=True)


def jpeg(size, orientation=None, cut=None):
    file = io.BytesIO()
    picture = PIL.Image.effect_noise(size, 50).convert("RGB")
    exif = PIL.Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    picture.save(file, format="JPEG", exif=exif)
    return file.getvalue()[:cut]


def render(renderer, folder=None, **row):
    return renderer.render(row, group_index=7, origin="train.jsonl, line 3", folder=folder)


def test_every_way_to_write_an_image_gives_the_same_prompt(renderer, tmp_path):
    (tmp_path / "pics").mkdir()
    (tmp_path / "pics/small.png").write_bytes(SMALL.data)
    text = base64.b64encode(SMALL.data).decode()
    ways = [
        "pics/small.png",
        str(tmp_path / "pics/small.png"),
        f"file://{tmp_path}/pics/small.png",
        SMALL.data,
        text,
        f"data:image/png;base64,{text}",
        {"bytes": SMALL.data, "path": "gone.png"},
        {"path": "pics/small.png"},
        {"bytes": None, "path": "pics/small.png"},
    ]
    prompts = [render(renderer, tmp_path, input="a<image>b", images=way) for way in ways]
    prompts += [render(renderer, tmp_path, input="a<image>b", images=[way]) for way in ways[:2]]
    assert {prompt.images[0].data for prompt in prompts} == {SMALL.data}
    assert {tuple(prompt.token_ids) for prompt in prompts} == {tuple(prompts[0].token_ids)}


def test_images_take_their_places_with_a_token_for_each_feature(renderer):
    parts = [{"type": "image"}, {"type": "text", "text": "="}]
    messages = [{"role": "user", "content": "1<image>2<image>"}, {"role": "user", "content": parts}]
    prompt = render(renderer, input=messages, images=[SMALL.data, WIDE.data, SMALL.data])
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt.text == f"1{image}2{image}{image}="
    # In squares of 8 pixels.
    counts = [
        int(n) for n in np.diff(np.flatnonzero(np.concatenate([[0], prompt.token_ids == PAD, [0]]) == 0)) - 1 if n
    ]
    assert counts == [1, 8, 1]
    starts = [place for image in prompt.images for place in image.places]
    assert [prompt.token_ids[place - 1 : place + 1].tolist() for place in starts] == [[2, PAD]] * 3
    assert [image.num_tokens for image in prompt.images] == counts
    assert [image.data for image in prompt.images] == [SMALL.data, WIDE.data, SMALL.data]
    json.dumps(prompt.messages)
    # A row without images, and without the column.
    assert render(renderer, input="1+1", images=[]).images == ()
    assert render(renderer, input="1+1").images == ()


def test_tokens_and_pixels_agree_for_all_sizes(folder):
    processor = ImageProcessor(folder)
    for width, height in [(8, 8), (5, 40), (100, 30), (24, 24), (25, 23), (3, 3), (300, 7)]:
        image = noise(width, height, 0)
        pixels = processor.pixels(image)
        assert processor.num_tokens(image) == pixels.num_tokens == int(pixels.grid_thw.prod()) // 4
        assert len(pixels.values) == pixels.grid_thw.prod()


def test_a_turned_photograph_is_turned_upright(renderer, folder):
    plain, turned = (render(renderer, input="<image>", images=jpeg((24, 8), side)) for side in (None, 6))
    size = {8: PIL.Image.open(io.BytesIO(turned.images[0].data)).size}
    assert size == {8: (8, 24)}
    assert ImageProcessor(folder).pixels(plain.images[0]).grid_thw.tolist() == [1, 2, 6]
    assert ImageProcessor(folder).pixels(turned.images[0]).grid_thw.tolist() == [1, 6, 2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"input": "<image>", "images": ["gone.png"]}, r'line 3: image 0 of "images": .*gone\.png cannot be read'),
        ({"input": "<image>", "images": b"no image"}, r"8 bytes that are no image; they begin with b'no image'"),
        ({"input": "<image>", "images": jpeg((64, 64), cut=600)}, r"image 0 of .*the image cannot be decoded: "),
        ({"input": "<image>", "images": SMALL.data[:100]}, r"image 0 of .*the image cannot be decoded: "),
        ({"input": "<image>", "images": [SMALL.data, SMALL.data]}, r"2 images, and 1 places"),
        ({"input": "no place", "images": SMALL.data}, r"1 images, and 0 places for them .*<image>"),
        ({"input": "<image>"}, r"0 images, and 1 places"),
        ({"input": "<image><|image_pad|>", "images": SMALL.data}, r"1 images, and 2 times <\|image_pad\|>"),
        ({"input": "<image>", "images": "https://example.org/a.png"}, r"images are read from files alone; download it"),
        ({"input": "<image>", "images": "data:image/png,abc"}, r"must contain ;base64"),
        ({"input": "<image>", "images": "data:image/png;base64,a=b"}, r"valid base64"),
        ({"input": "<image>", "images": {"url": "a"}}, r'neither "bytes" nor "path"; it has url'),
        ({"input": "<image>", "images": 7}, r"a path, bytes, base64, a data URL or an object .* found 7"),
        (
            {"input": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
            r"a message holds an image itself \(type, image\)",
        ),
    ],
)
def test_errors_name_the_row_and_the_image(renderer, tmp_path, row, expected):
    with pytest.raises(DataError, match=expected) as error:
        render(renderer, tmp_path, **row)
    assert str(error.value).startswith("train.jsonl, line 3: ")


def test_rows_with_damaged_images_are_left_out_and_counted(renderer, tmp_path):
    rows = {"input": ["1<image>", "2<image>", "3<image>"], "images": [[SMALL.data], [SMALL.data[:100]], [WIDE.data]]}
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table(rows), path)
    for streaming in (False, True):
        skipping = Files.Config(prompt_data=str(path), on_bad_row="skip", streaming=streaming)
        source = Files.build(skipping)(renderer, seed=0)
        assert [prompt.text[0] for prompt in source.take(4)] == ["1", "3", "1", "3"]
        assert source.metrics["rollout/data/num_bad_rows"] == (2 if streaming else 1)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: image 0 of .*cannot be decoded"):
        Files.build(Files.Config(prompt_data=str(path)))(renderer, seed=0)


def test_a_model_or_folder_without_images_is_an_error(tmp_path, folder):
    with pytest.raises(ModelError, match=r"a model of type qwen3 takes no images"):
        ImageProcessor(make_tiny_model(tmp_path / "text"))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json in it"):
        ImageProcessor(tmp_path)


def sample_of(prompt, index, *response):
    tokens = np.concatenate([prompt.token_ids, np.array(response, np.int32)])
    return Sample(
        index=index,
        group_index=prompt.group_index,
        rollout_id=index,
        prompt=prompt,
        tokens=tokens,
        prompt_length=len(prompt.token_ids),
        loss_mask=np.ones(len(response), np.uint8),
        rollout_log_probs=np.zeros(len(response), np.float32),
        reward=0.5,
    )


@pytest.fixture
def some_groups(renderer):
    prompts = [
        replace(render(renderer, input="1<image><image>", images=[SMALL.data, WIDE.data]), group_index=0),
        replace(render(renderer, input="1+1"), group_index=1),
        replace(render(renderer, input="2<image>", images=[WIDE.data]), group_index=2),
    ]
    lengths = [(1, 2, 3), (4,), (0, 1)]
    index = iter(range(9))
    return [
        SampleGroup(prompt=prompt, samples=tuple(sample_of(prompt, next(index), *[9] * n) for n in ns))
        for prompt, ns in zip(prompts, lengths, strict=True)
    ]


@pytest.mark.parametrize("together", [2**28, 700, 1])
def test_groups_hold_each_image_once_in_a_file(some_groups, tmp_path, monkeypatch, together):
    """However many row groups there are: Arrow could not read one of more than 2 GiB."""
    monkeypatch.setattr("slime_core.data.table.IMAGE_BYTES_TOGETHER", together)
    write_groups(tmp_path / "groups.parquet", some_groups)
    read = read_groups(tmp_path / "groups.parquet")
    assert [group.prompt.images for group in read] == [group.prompt.images for group in some_groups]
    assert all(sample.prompt is group.prompt for group in read for sample in group.samples)
    assert (pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups > 1) == (together < 2**28)
    written = pq.read_table(tmp_path / "groups.parquet")["images"].to_pylist()
    assert [None if images is None else len(images) for images in written] == [2, None, None, 0, 1, None]


def test_batches_take_only_the_images_of_their_samples(some_groups, tmp_path):
    batch = build_batch(some_groups)
    assert len(batch.images) == 2
    assert batch.images.counts.tolist() == [2, 2, 2, 0, 1, 1]
    last = batch.take(np.array([5, 3]))
    assert [last.images.encoded(number) for number in range(len(last.images))] == [WIDE.data]
    assert last.images.places_of(0) == batch.images.places_of(5) == [(2,)]
    assert batch.take(np.array([3])).images is None
    write_train_data(tmp_path / "step_000000.parquet", batch, TokenColumns())
    read, _ = read_train_data(tmp_path / "step_000000.parquet")
    for name in ("data", "offsets", "which", "counts", "places", "place_counts"):
        np.testing.assert_array_equal(getattr(read.images, name), getattr(batch.images, name))


def test_a_micro_batch_has_each_image_once_and_the_feature_of_each_token(some_groups, folder):
    batch = build_batch(some_groups)
    opened = []
    cache = PixelCache(lambda: opened.append(1) or ImageProcessor(folder))
    micro = pack_micro_batch(batch, np.array([4, 3, 1]), pixels=cache)
    assert micro.images.grid_thw.tolist() == [[1, 4, 8], [1, 2, 2]]
    seen = micro.images.feature_of_token
    assert torch.equal(seen >= 0, micro.tokens == PAD)
    # WIDE first, as sample 4 sees it; then sample 1 sees SMALL and WIDE.
    assert seen[seen >= 0].tolist() == [*range(8), 8, *range(8)]
    assert pack_micro_batch(batch, np.array([3]), pixels=cache).images is None
    assert opened == [1]
    broken = replace(batch, tokens=np.where(batch.tokens == PAD, 9, batch.tokens).astype(np.int32))
    with pytest.raises(DataError, match=r"sample 4: its prompt has 0 image tokens, and its images have 8"):
        pack_micro_batch(broken, np.array([4]), pixels=cache)


def test_images_may_come_after_trained_tokens(some_groups, folder):
    """Without `places`, the image tokens of the prompt get the features."""
    processor = ImageProcessor(folder)
    placed = sample_of(replace(some_groups[1].prompt, images=(replace(SMALL, places=(6,)),)), 0, 9, PAD, 9, PAD, 9)
    assert placed.prompt_length == 3
    unplaced = replace(some_groups[2].prompt, images=(WIDE,))
    samples = [placed, sample_of(unplaced, 1, 9, PAD)]
    groups = [SampleGroup(prompt=sample.prompt, samples=(sample,)) for sample in samples]
    micro = pack_micro_batch(build_batch(groups), np.arange(2), pixels=PixelCache(lambda: processor))
    assert micro.images.feature_of_token.tolist() == [*[-1] * 6, 0, -1, -1, -1, *range(1, 9), -1, -1, -1]
    moved = replace(placed, prompt=replace(placed.prompt, images=(replace(SMALL, places=(5,)),)))
    batch = build_batch([SampleGroup(prompt=moved.prompt, samples=(moved,))])
    with pytest.raises(DataError, match="sample 0: its prompt has 0 image tokens, and its images have 1 features"):
        pack_micro_batch(batch, np.arange(1), pixels=PixelCache(lambda: processor))


def test_a_small_cache_computes_again(folder):
    processor = ImageProcessor(folder)
    cache = PixelCache(lambda: processor, limit=1)
    first = cache.pixels(SMALL)
    assert cache.pixels(SMALL) is first
    cache.pixels(WIDE)
    again = cache.pixels(SMALL)
    assert again is not first
    np.testing.assert_array_equal(again.values, first.values)


def test_equal_prompts_share_their_images():
    assert Prompt(group_index=0, text="", token_ids=np.ones(1, np.int32), images=(SMALL,)).images == (noise(8, 8, 0),)


def in_mode(mode):
    file = io.BytesIO()
    PIL.Image.open(io.BytesIO(noise(16, 24, 2).data)).convert(mode).save(file, format="PNG")
    return Image(data=file.getvalue())


@pytest.mark.parametrize(
    ("image", "size"),
    [(noise(40, 37, 1), (24, 16)), (noise(9, 9, 1), (8, 8)), (in_mode("RGBA"), (16, 24)), (in_mode("P"), (16, 24))],
)
def test_a_resized_image_has_equal_pixels(image, size, folder):
    processor = ImageProcessor(folder)
    sent = processor.resized(image)
    picture = PIL.Image.open(io.BytesIO(sent))
    assert (picture.size, picture.mode) == (size, "RGB")
    again, whole = processor.pixels(Image(data=sent)), processor.pixels(image)
    assert np.array_equal(again.values, whole.values)
    assert again.num_tokens == whole.num_tokens
    # It is sent as it is now.
    assert processor.resized(Image(data=sent)) == sent
    rgb = noise(16, 24, 3)
    assert processor.resized(rgb) is rgb.data
