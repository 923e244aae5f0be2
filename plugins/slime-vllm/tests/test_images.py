"""Requests with images, without a server. test_replaced_server.py has a run."""

import base64
import io
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from vllm_setup import setup_for

from slime_core.errors import EngineRefused
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_core.types.image import Image
from slime_models.media.image_processor import ImageProcessor
from slime_plugin_kit.tiny_vision import IMAGE_TOKEN, image_prompt, noise
from slime_vllm.features import Features
from slime_vllm.images import SentImages
from slime_vllm.requests import VllmRequests

FEATURES = Features(ranks=1, tokenizer=True, prefix_caching=True, grammar_backend="auto", has_priorities=False)


@pytest.fixture
def requests(vision_model, tmp_path):
    setup = setup_for(vision_model, tmp_path)
    return VllmRequests.of(setup, FEATURES, images=SentImages.of(setup), pause_mode="abort", adapters=None)


@pytest.fixture
def request_with_images(vision_model):
    prompt = image_prompt(ImageProcessor(vision_model), 0, 9, noise(40, 37, 1), 12, noise(8, 8, 0))
    return GenerateRequest(
        request_id="a/1/0",
        token_ids=prompt.token_ids,
        sampling=SamplingParams(max_new_tokens=8),
        seed=1,
        images=prompt.images,
    )


def reply(running, tokens, reason="length", read=0):
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {
        "finish_reason": reason,
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "weight_versions": [{"version": "default", "start": 0, "end": len(tokens)}],
    }
    return {"choices": [choice], "usage": {"prompt_tokens": len(running.tokens()) + read}}


def test_images_go_with_their_tokens_once_in_the_size_of_the_tower(requests, request_with_images):
    body = requests.begin(request_with_images).body(room=100)
    assert body["token_ids"].tolist() == [9, 2, IMAGE_TOKEN, 3, 12, 2, IMAGE_TOKEN, 3]
    assert [part["type"] for part in body["content_parts"]] == ["image_url", "image_url"]
    large, small = (base64.b64decode(part["url"].partition(",")[2]) for part in body["content_parts"])
    assert PIL.Image.open(io.BytesIO(large)).size == (24, 16)
    assert small == request_with_images.images[1].data


def test_a_response_to_other_features_is_refused(requests, request_with_images):
    running = requests.begin(request_with_images)
    with pytest.raises(EngineRefused, match=r"computes other image features than the run"):
        running.take(reply(running, [11], read=1), expected_version=None, server="engine 0")
    taken = running.take(reply(running, [11]), expected_version=None, server="engine 0")
    assert taken is FinishReason.LENGTH


def test_a_written_image_token_is_not_sent_back(requests, request_with_images):
    running = requests.begin(request_with_images)
    running.take(reply(running, [10, 11, IMAGE_TOKEN, 12], "abort"), expected_version=None, server="engine 0")
    running.interrupt()
    assert running.token_ids.tolist() == [10, 11]
    assert running.body(room=100)["token_ids"].tolist()[-2:] == [10, 11]
    longer = np.append(request_with_images.token_ids, [10, IMAGE_TOKEN]).astype(np.int32)
    problem = requests.problem([replace(request_with_images, token_ids=longer)], ())
    assert "has 2 images, but 3 places for them" in problem


def test_what_cannot_be_sent_is_refused(requests, request_with_images):
    assert requests.problem([request_with_images], ()) is None
    assert "take none with this model" in replace(requests, images=None).problem([request_with_images], ())
    kept = replace(requests, pause_mode="retract")
    assert 'engine.pause_mode = "retract" would keep their features of old weights' in kept.problem(
        [request_with_images], ()
    )
    video = replace(request_with_images, images=(Image(data=b"", frames=2), request_with_images.images[0]))
    assert "has videos" in requests.problem([video], ())
