"""Videos from rows to prompts, tables and batches."""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import sys

import av
import numpy as np
import PIL.Image
import pytest
import torch

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.data.model_folder import load_tokenizer
from slime_core.data.table import read_groups, write_groups
from slime_core.data.train_data import read_train_data, write_train_data
from slime_core.errors import DataError, ModelError
from slime_core.types import Sample, SampleGroup
from slime_core.types.batch import TokenColumns
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_models.media.qwen_vl import QwenVl
from slime_models.new_model import ModelSizes
from slime_models.new_vision_model import VisionSizes, new_vision_model
from slime_plugin_kit.tiny_vision import noise
from slime_sources.plugin import Files
from slime_sources.rendering.prompt_renderer import PromptRenderer

PATCH = 4
MARK = "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("vision") / "model"
    sizes = ModelSizes(hidden_size=24, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=8, max_length=128)
    vision = VisionSizes(
        hidden_size=16, num_layers=2, num_heads=2, intermediate_size=8, patch_size=PATCH, max_pixels=256
    )
    new_vision_model(made, sizes, vision, alphabet="0123456789.<> secondab?")
    return made


@pytest.fixture(scope="module")
def processor(folder):
    return ImageProcessor(folder)


@pytest.fixture(scope="module")
def renderer(folder):
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    columns = {"image": "images", "video": "clips"}
    media = QwenVl().renderer(folder, tokenizer, columns, trust_remote_code=False)
    return PromptRenderer(tokenizer, media=media, apply_chat_template=True)


def film(count, *, fps=4, size=(16, 8), codec="ffv1", form="matroska"):
    """A lossless video whose frames are of one grey each, and these greys."""
    greys = [5 * number for number in range(count)]
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for grey in greys:
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), grey, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue(), greys


def render(renderer, folder=None, **row):
    return renderer.render(row, group_index=7, origin="train.jsonl, line 3", folder=folder)


def greys_of(image):
    whole = np.asarray(PIL.Image.open(io.BytesIO(image.data)))
    return whole.reshape(image.frames, -1, 3)[:, 0, 0].tolist()


def test_a_file_is_sampled_by_its_time(renderer, tmp_path):
    """Two frames a second of three seconds at four: transformers' own rule, over the whole length."""
    data, greys = film(12)
    (tmp_path / "clip.mkv").write_bytes(data)
    ways = ["clip.mkv", base64.b64encode(data).decode(), {"bytes": data}, ["clip.mkv"]]
    prompts = [render(renderer, tmp_path, input="a<video>b?", clips=way) for way in ways]
    for prompt in prompts:
        (video,) = prompt.images
        taken = [0, 2, 4, 7, 9, 11]
        assert greys_of(video) == [greys[number] for number in taken]
        assert video.seconds == (0.25, 1.375, 2.5)
        # Rounded to even: 0.25 is 0.2.
        assert prompt.text == f"a<0.2 seconds>{MARK}<1.4 seconds>{MARK}<2.5 seconds>{MARK}b?"
        # 16 x 8 pixels are two squares of 8.
        assert [prompt.token_ids[place - 1 : place + 3].tolist() for place in video.places] == [[2, 5, 5, 3]] * 3
        assert video.num_tokens == 6
    assert prompts[0].messages == [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "video"}, {"type": "text", "text": "b?"}
    ]}]  # fmt: skip


def test_frames_are_a_video_too(renderer):
    frames = [noise(16, 8, number).data for number in range(3)]
    plain = render(renderer, input="<video>", clips=[frames])
    timed = render(renderer, input="<video>", clips={"frames": frames, "fps": 0.5})
    # Two frames a second unless fps is given; an odd last frame is used twice.
    assert plain.text == f"<0.2 seconds>{MARK}<1.0 seconds>{MARK}"
    assert timed.text == f"<1.0 seconds>{MARK}<4.0 seconds>{MARK}"
    (video,) = plain.images
    whole = np.asarray(PIL.Image.open(io.BytesIO(video.data)))
    expected = [np.asarray(PIL.Image.open(io.BytesIO(frame))) for frame in (*frames, frames[2])]
    np.testing.assert_array_equal(whole, np.concatenate(expected))


def test_pixels_are_those_of_transformers_formula(renderer, processor):
    """Two frames are one in the third dimension of a patch, whose layout is (channel, time, row, column)."""
    frames = [noise(16, 8, number).data for number in range(4)]
    (video,) = render(renderer, input="<video>", clips=[frames]).images
    found = processor.pixels(video)
    assert found.grid_thw.tolist() == [2, 2, 4]
    assert found.grids.tolist() == [[1, 2, 4]] * 2
    pictures = np.stack([np.asarray(PIL.Image.open(io.BytesIO(frame)), np.float64) for frame in frames]) / 127.5 - 1
    expected = [
        [pictures[2 * pair + time, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4, channel]
         for channel in range(3) for time in range(2)]
        for pair in range(2)
        # Squares of two by two patches, one after the other.
        for square in range(2) for row in range(2) for column in (2 * square, 2 * square + 1)
    ]  # fmt: skip
    np.testing.assert_allclose(found.values, np.array(expected).reshape(16, -1), atol=1e-6)


def test_images_and_videos_in_one_prompt_stand_in_order(renderer):
    frames = [noise(8, 8, number).data for number in range(2)]
    prompt = render(renderer, input="<video>a<image>b<video>", clips=[frames, frames[::-1]], images=noise(8, 8, 5).data)
    assert [image.frames for image in prompt.images] == [2, 0, 2]
    places = [place for image in prompt.images for place in image.places]
    assert places == sorted(places)
    assert prompt.token_ids[places].tolist() == [5, 4, 5]


def test_a_large_video_is_made_smaller(renderer, processor):
    """All frames together have a limit, here of eight times 256 pixels."""
    data, _ = film(24, size=(64, 32), fps=2)
    (video,) = render(renderer, input="<video>", clips=data).images
    width, height = PIL.Image.open(io.BytesIO(video.data)).size
    assert video.frames == 24
    assert width * height <= 8 * 256
    assert (width % 8, height // 24 % 8) == (0, 0)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"clips": b"nothing"}, r'line 3: video 0 of "clips": 7 bytes that cannot be decoded as a video'),
        (
            {"clips": film(40)[0][:-1200]},
            r'line 3: video 0 of "clips": cut short: its header has 10.0 s, and its last frame is at',
        ),
        ({"clips": "gone.mp4"}, r'line 3: video 0 of "clips": gone.mp4 cannot be read'),
        ({"clips": [[]]}, r'line 3: video 0 of "clips": a video without frames'),
        ({"clips": [[noise(8, 8, 0).data, b"x"]]}, r'line 3: video 0 of "clips", frame 1: 1 bytes that are no image'),
        ({"clips": [[noise(8, 8, 0).data, noise(16, 8, 0).data]]}, r"several sizes: \[\(8, 8\), \(16, 8\)\]"),
        ({"clips": {"frames": [noise(8, 8, 0).data], "fps": 0}}, r'"fps" must be a positive number, found 0'),
        ({"clips": noise(8, 8, 0).data, "input": "no place"}, r"line 3: 1 videos, and 0 places .* write <video>"),
        ({"input": "<video>"}, r"line 3: 0 videos, and 1 places for them"),
        ({"clips": [[noise(4, 8, 0).data]]}, r"a video of 4 x 8 pixels"),
    ],
)
def test_errors_name_the_row_and_the_video(renderer, row, expected):
    with pytest.raises(DataError, match=expected):
        render(renderer, **{"input": "<video>", **row})


def test_a_damaged_row_can_be_left_out(renderer, tmp_path):
    rows = [{"input": "<video>", "clips": "AAAA"}, {"input": "<video>", "clips": base64.b64encode(film(4)[0]).decode()}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Files.Config(prompt_data=str(tmp_path / "train.jsonl"), on_bad_row="skip")
    source = Files.build(config)(renderer, seed=0)
    assert (source.num_rows, source.metrics["rollout/data/num_bad_rows"]) == (1, 1)


def test_without_pyav_the_error_names_what_to_install(renderer, monkeypatch):
    assert importlib.metadata.version("av")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ModelError, match=r'pip install "slime-rl\[video\]"'):
        render(renderer, input="<video>", clips=b"any")


def test_files_and_micro_batches_hold_a_video_once(renderer, processor, tmp_path):
    frames = [noise(16, 8, number).data for number in range(4)]
    prompt = render(renderer, input="a<video>b", clips=[frames])
    samples = tuple(
        Sample(
            index=number, group_index=7, rollout_id=number, prompt=prompt, prompt_length=len(prompt.token_ids),
            tokens=np.concatenate([prompt.token_ids, np.array([9, 5], np.int32)]), loss_mask=np.ones(2, np.uint8),
            rollout_log_probs=np.zeros(2, np.float32), reward=0.0,
        )
        for number in range(2)
    )  # fmt: skip
    group = SampleGroup(prompt=prompt, samples=samples)
    write_groups(tmp_path / "groups.parquet", [group])
    (read,) = read_groups(tmp_path / "groups.parquet")
    assert read.prompt.images == prompt.images
    write_train_data(tmp_path / "step_000000.parquet", build_batch([read]), TokenColumns())
    batch, _ = read_train_data(tmp_path / "step_000000.parquet")
    micro = pack_micro_batch(batch.take(np.array([1, 0])), np.arange(2), pixels=PixelCache(lambda: processor))
    assert micro.images.grid_thw.tolist() == [[1, 2, 4]] * 2
    of_token = micro.images.feature_of_token.reshape(2, -1)
    assert torch.equal(of_token[0], of_token[1])
    # The video token that the model has written gets no feature.
    assert (of_token[0] >= 0).tolist() == [
        token == 5 and at < len(prompt.token_ids) for at, token in enumerate(samples[0].tokens)
    ]
    assert of_token[0][of_token[0] >= 0].tolist() == [0, 1, 2, 3]
