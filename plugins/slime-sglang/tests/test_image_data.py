"""Bodies for /generate of prompts with images, and a whole run with the real SGLang."""

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_setup import setup_for

from slime_core.errors import EngineRefused
from slime_core.types.completion import FinishReason, GenerateRequest, SamplingParams
from slime_models.media.image_processor import ImageProcessor
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_vision import IMAGE_TOKEN, image_prompt, make_tiny_vision_model, noise
from slime_serving.image_tokens import ImageTokens
from slime_sglang.generation import SglangRunning
from slime_sglang.launching import environment_for, options_for
from slime_sglang.plugin import Sglang

VIDEO_TOKEN = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def running(folder):
    prompt = image_prompt(ImageProcessor(folder), 0, 9, noise(20, 9, 1), 12, noise(8, 8, 0))
    request = GenerateRequest(
        request_id="a/1/0",
        token_ids=prompt.token_ids,
        sampling=SamplingParams(max_new_tokens=8),
        seed=1,
        images=prompt.images,
    )
    return SglangRunning(request=request, vocab_size=40, image_tokens=ImageTokens.of(folder))


def reply(running, tokens, reason="length", read=0):
    sent = len(running.request.token_ids) + len(running.token_ids)
    return {
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "weight_version": "default",
            "prompt_tokens": sent + read,
        }
    }


def take(running, response):
    return running.take(response, expected_version=None, server="engine 0")


def test_images_go_with_their_tokens_once(running):
    tokens = running.request.token_ids
    assert (tokens == IMAGE_TOKEN).sum() == 3
    body = running.body(room=100)
    assert body["input_ids"].tolist() == [9, 2, IMAGE_TOKEN, 3, 12, 2, IMAGE_TOKEN, 3]
    decoded = [base64.b64decode(data.partition(",")[2]) for data in body["image_data"]]
    assert decoded == [image.data for image in running.request.images]


def test_a_response_to_other_features_is_refused(running):
    assert take(running, reply(running, [10])) is FinishReason.LENGTH
    with pytest.raises(
        EngineRefused, match=r"it read 11 tokens, but request a/1/0 has 10: it computes other image features"
    ):
        take(running, reply(running, [11], read=1))


@pytest.mark.parametrize("token", [IMAGE_TOKEN, VIDEO_TOKEN])
def test_a_written_image_token_is_not_sent_back(running, token):
    """SGLang would look for an image behind it: it is written again."""
    take(running, reply(running, [10, 11, token, 12], "abort"))
    running.interrupt()
    assert running.token_ids.tolist() == [10, 11]
    assert running.body(room=100)["input_ids"].tolist()[-2:] == [10, 11]
    # A request that resumes from such tokens cannot be served.
    tokens = ImageTokens(IMAGE_TOKEN, frozenset({IMAGE_TOKEN, VIDEO_TOKEN}))
    longer = np.append(running.request.token_ids, [10, token]).astype(np.int32)
    problem = tokens.problem(replace(running.request, token_ids=longer))
    assert "has 2 images, but 3 places for them" in problem
    assert tokens.problem(replace(running.request, token_ids=longer, images=())) is None
    assert tokens.problem(running.request) is None


def test_servers_of_a_model_with_images(folder, tmp_path):
    options = options_for(Sglang.Config(), setup_for(folder, tmp_path), 0)
    assert options["disable_fast_image_processor"] is True
    text = make_tiny_model(tmp_path / "text")
    assert "disable_fast_image_processor" not in options_for(Sglang.Config(), setup_for(text, tmp_path), 0)
    assert ImageTokens.of(text) is None
    # Features of an image by old weights must not be cached.
    assert environment_for(setup_for(folder, tmp_path), (), 1)["SGLANG_VLM_CACHE_SIZE_MB"] == "0"


@pytest.mark.sglang
def test_a_run_with_images_agrees_with_its_trainer_at_every_step(folder, tmp_path):
    """Nothing of older weights is left after a push, though the images are the same in every step."""
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(noise(20 + 4 * number, 16, number).data)
    rows = [{"prompt": f"{n}+<image>=", "images": [f"{n}.png"], "label": str(n)} for n in range(4)]
    rows[3] = {"prompt": "1+1=", "label": "2"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        f"""
name = "images"
backend = "fsdp"
engine = "sglang"
reward = "random"
algo = {{ name = "grpo", get_mismatch_metrics = true }}
model = {{ hf_checkpoint = "{folder}" }}
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = 4, rollout_max_response_len = 6 }}
train = {{ num_rollout = 3, lr = 1e-2 }}
sync = {{ transport = "ipc", check_weight_update_equal = true }}
checkpoint = {{ save_hf = false }}
[data]
prompt_data = "train.jsonl"
input_key = "prompt"
label_key = "label"
apply_chat_template = true
multimodal_keys = {{ image = "images" }}
"""
    )
    command = [str(Path(sys.executable).with_name("slime")), "run", "run.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line)["metrics"] for line in (tmp_path / "runs/images/metrics.jsonl").read_text().splitlines()]
    apart = [m["train/train_rollout_logprob_abs_diff"] for m in lines if "train/train_rollout_logprob_abs_diff" in m]
    moved = [m["train/grad_norm"] for m in lines if "train/grad_norm" in m]
    assert len(apart) == 3
    assert min(moved) > 0
    assert max(apart) < 1e-5
