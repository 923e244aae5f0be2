"""Requests with images, against transformers' own model over the whole sequence."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.contracts.engine import Capability
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineRefused
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_local.config import LocalConfig
from slime_local.engine import LocalEngine
from slime_models.media.image_processor import ImageProcessor
from slime_plugin_kit.tiny_model import buckets_of, make_tiny_model, moved
from slime_plugin_kit.tiny_vision import (
    MAX_LENGTH,
    image_log_probs_of,
    image_prompt,
    load_plain_vision,
    make_tiny_vision_model,
    noise,
    video_log_probs_of,
    video_prompt,
    with_stand_in,
)

IMAGES = [noise(8, 8, 0), noise(20, 9, 1), noise(8, 8, 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


def setup_of(folder, run_dir):
    return EngineSetup(
        index=0, model_path=folder, device="cpu", seed=0, max_context_len=MAX_LENGTH, max_batch=64, run_dir=run_dir
    )


def request_of(processor, name, *parts, seed=1, tokens=9):
    prompt = image_prompt(processor, 0, *parts)
    return GenerateRequest(
        request_id=name,
        token_ids=prompt.token_ids,
        # No early end: every response has its whole length.
        sampling=SamplingParams(max_new_tokens=tokens, min_new_tokens=tokens, temperature=1.0),
        seed=seed,
        images=prompt.images,
    )


def log_probs_of(plain, processor, request, response):
    """(R,) by transformers alone, in float64."""
    with torch.no_grad():
        pixels = [processor.pixels(image) for image in request.images]
        return image_log_probs_of(plain, pixels, request.token_ids, response).numpy()


async def push(engine, weights, version):
    await engine.pause()
    for bucket in buckets_of(weights, version, 2):
        await engine.load_bucket(bucket)
    await engine.resume()


def test_responses_are_those_of_the_whole_model_also_after_new_weights(folder, tmp_path):
    processor = ImageProcessor(folder)
    before, after = load_plain_vision(folder), moved(load_plain_vision(folder), seed=5)
    weights = [{name: p.detach().float() for name, p in model.named_parameters()} for model in (before, after)]
    before, after = with_stand_in(before), with_stand_in(after)

    async def scenario():
        engine = LocalEngine(LocalConfig(dtype="float32"))
        info = await engine.start(setup_of(folder, tmp_path))
        assert Capability.IMAGES in info.capabilities
        requests = [
            request_of(processor, "one", 9, IMAGES[0], 10),
            # Equal prompts, another seed; and equal tokens under another image.
            request_of(processor, "again", 9, IMAGES[0], 10, seed=2),
            request_of(processor, "other", 9, IMAGES[2], 10),
            request_of(processor, "two", IMAGES[1], 12, IMAGES[0], 13, 14),
            request_of(processor, "text", 15, 16, 17),
        ]
        await push(engine, weights[0], 0)
        first = await engine.generate(requests)
        # Weights change under running responses: keys and values are computed anew, of the images too.
        running = asyncio.create_task(engine.generate([replace(r, request_id=r.request_id + "-2") for r in requests]))
        for _ in range(5):
            await asyncio.sleep(0)
        await push(engine, weights[1], 1)
        second = await running
        # As a partial rollout continues: the tokens so far belong to the request.
        going = [
            replace(
                request,
                request_id=request.request_id + "-3",
                token_ids=np.concatenate([request.token_ids, completion.token_ids[:4]]),
                sampling=SamplingParams(max_new_tokens=5, min_new_tokens=5),
            )
            for request, completion in zip(requests, second, strict=True)
        ]
        third = await engine.generate(going)
        short = replace(requests[3], request_id="short", token_ids=requests[3].token_ids[:3])
        with pytest.raises(EngineRefused, match="2 image tokens, and its images have 3"):
            await engine.generate([short])
        await engine.stop()
        return requests, first, second, third

    requests, first, second, third = asyncio.run(scenario())
    models = {0: before, 1: after}
    for responses in (first, second):
        for request, completion in zip(requests, responses, strict=True):
            for version, start, end in completion.spans:
                expected = log_probs_of(models[version], processor, request, completion.token_ids)
                np.testing.assert_allclose(completion.log_probs[start:end], expected[start:end], atol=2e-4)
    assert {span.version for completion in second for span in completion.spans} == {0, 1}
    for request, start, completion in zip(requests, second, third, strict=True):
        whole = np.concatenate([start.token_ids[:4], completion.token_ids])
        np.testing.assert_allclose(completion.log_probs, log_probs_of(after, processor, request, whole)[4:], atol=2e-4)
    # Another image gives other numbers, and equal prompts are computed once.
    assert np.abs(first[0].log_probs[0] - first[2].log_probs[0]) > 1e-3
    assert [completion.cached_tokens > 0 for completion in first] == [False, True, False, False, False]


def test_a_model_of_text_refuses_images(folder, tmp_path):
    async def scenario():
        engine = LocalEngine(LocalConfig())
        info = await engine.start(setup_of(make_tiny_model(tmp_path / "text"), tmp_path))
        assert Capability.IMAGES not in info.capabilities
        with pytest.raises(EngineRefused, match="has images, and Qwen3ForCausalLM takes none"):
            await engine.generate([request_of(ImageProcessor(folder), "one", IMAGES[0])])
        await engine.stop()

    asyncio.run(scenario())


def test_videos_are_those_of_the_whole_model(folder, tmp_path):
    """Transformers gets them as videos."""
    processor = ImageProcessor(folder)
    plain = with_stand_in(load_plain_vision(folder), processor.video_token_id)
    films = [[noise(16, 8, n) for n in range(5)], [noise(8, 24, n) for n in range(2)]]
    prompts = [
        video_prompt(folder, processor, 0, 9, films[0], 10),
        video_prompt(folder, processor, 1, films[1], 11, films[0], 12),
    ]
    sampling = SamplingParams(max_new_tokens=7, min_new_tokens=7, temperature=1.0)
    requests = [
        GenerateRequest(request_id=str(n), token_ids=prompt.token_ids, sampling=sampling, seed=n, images=prompt.images)
        for n, prompt in enumerate(prompts)
    ]

    async def scenario():
        engine = LocalEngine(LocalConfig(dtype="float32"))
        info = await engine.start(setup_of(folder, tmp_path))
        assert Capability.VIDEOS in info.capabilities
        responses = await engine.generate(requests)
        moved = replace(prompts[0].images[0], places=tuple(place + 1 for place in prompts[0].images[0].places))
        with pytest.raises(EngineRefused, match="they were rendered with another image processor"):
            await engine.generate([replace(requests[0], request_id="moved", images=(moved,))])
        await engine.stop()
        return responses

    for prompt, completion in zip(prompts, asyncio.run(scenario()), strict=True):
        pixels = [processor.pixels(video) for video in prompt.images]
        values, grids = np.concatenate([one.values for one in pixels]), np.stack([one.grid_thw for one in pixels])
        with torch.no_grad():
            expected = video_log_probs_of(plain, values, grids, prompt.token_ids, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
