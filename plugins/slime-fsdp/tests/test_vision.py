"""Images against transformers' Qwen3VLForConditionalGeneration, run unpacked, one sample at a time."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import ObjectiveOutput
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_fsdp.backend import FsdpBackend
from slime_fsdp.config import FsdpConfig
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_plugin_kit.tiny_vision import (
    IMAGE_TOKEN,
    image_batch,
    image_log_probs_of,
    image_logits_of,
    image_prompt,
    image_sample,
    image_samples,
    load_plain_vision,
    make_tiny_vision_model,
    noise,
    video_log_probs_of,
    video_prompt,
    with_stand_in,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def processor(folder):
    return ImageProcessor(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return with_stand_in(load_plain_vision(folder, torch.float32))


@pytest.fixture(scope="module")
def samples(processor):
    return image_samples(processor)


def log_probs_of(plain, processor, sample):
    """(R,) log-probs by transformers."""
    pixels = [processor.pixels(image) for image in sample.prompt.images]
    return image_log_probs_of(plain, pixels, sample.prompt.token_ids, sample.response_tokens)


def backend_of(folder, *, lr=1e-2, head="lm", **options):
    backend = FsdpBackend(FsdpConfig(**options))
    backend.setup(
        TrainerSetup(
            role="actor",
            rank=0,
            world_size=1,
            local_rank=0,
            rendezvous="",
            device="cpu",
            model_path=folder,
            optimizer=OptimizerConfig(lr=lr, clip_grad=0.0),
            total_steps=10,
            seed=0,
            head=head,
        )
    )
    return backend


@dataclass(frozen=True)
class Sum:
    """Minus the sum of the trained log-probs, or values."""

    reads_values: bool = False
    needs_entropy = entropy_has_gradient = False

    def __call__(self, micro, *, segments, log_probs=None, entropy=None, values=None):
        scored = values if self.reads_values else log_probs
        return ObjectiveOutput(loss=-(scored * micro.mask).sum(), sums={})


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"attn_implementation": "eager"}])
def test_log_probs_equal_those_of_single_samples(folder, processor, plain, samples, options):
    with torch.no_grad():
        required = torch.cat([log_probs_of(plain, processor, sample) for sample in samples])
    batch = image_batch(samples)
    cache = PixelCache(lambda: processor)
    # Without images in one micro-batch, and in parts: neither changes anything.
    parts = [np.arange(8), np.array([7]), np.array([2, 5])]
    backend = backend_of(folder, **options)
    scored = backend.forward_only([pack_micro_batch(batch, part, pixels=cache) for part in parts])
    of_sample = required.split([sample.response_length for sample in samples])
    for part, scores in zip(parts, scored, strict=True):
        expected = torch.cat([of_sample[number] for number in part]).numpy()
        np.testing.assert_allclose(scores.log_probs, expected, atol=1e-5)
    # It would show if images were left out.
    blind = backend.forward_only([pack_micro_batch(replace(batch, images=None), np.arange(8))])
    assert np.abs(blind[0].log_probs - required.numpy()).max() > 0.1
    backend.close()


def test_gradients_equal_those_of_single_samples(folder, processor, samples):
    plain = with_stand_in(load_plain_vision(folder, torch.float32))
    total = torch.zeros(())
    for sample in samples:
        chosen = log_probs_of(plain, processor, sample)
        total = total - (chosen * torch.from_numpy(sample.loss_mask.astype(np.float32))).sum()
    total.backward()
    required = {name: parameter.grad for name, parameter in plain.named_parameters()}

    backend = backend_of(folder)
    found = {}
    real = backend._step
    backend._step = lambda *given: (
        found.update({n: p.grad.clone() for n, p in backend._ready.model.model.named_parameters()}),
        real(*given),
    )
    batch = image_batch(samples)
    cache = PixelCache(lambda: processor)
    parts = [np.array([0, 1, 2, 7]), np.array([3, 4]), np.array([5, 6])]
    backend.train_step([pack_micro_batch(batch, part, pixels=cache) for part in parts], Sum())
    largest = max(float(gradient.abs().max()) for gradient in required.values() if gradient is not None)
    for name, gradient in required.items():
        if name.endswith("embed_tokens.weight"):
            gradient = gradient[:-1].index_add(0, torch.tensor([IMAGE_TOKEN]), gradient[-1:])
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * largest, err_msg=name)
    visual = [float(found[name].abs().max()) for name in found if ".visual." in name]
    assert len(visual) > 20
    assert min(visual[:-1]) > 0
    backend.close()


@pytest.mark.bits
def test_values_and_their_gradients_equal_those_of_single_samples(folder, processor, samples, tmp_path):
    backend = backend_of(folder, head="value")
    backend.save_hf(tmp_path / "critic")
    saved = load_file(tmp_path / "critic" / "model.safetensors")
    # The oracle: transformers' model in float64, with the critic's head in place of its own.
    plain = with_stand_in(load_plain_vision(folder))
    head = torch.nn.Linear(24, 1, dtype=torch.float64)
    head.load_state_dict({name: saved[f"score.{name}"].double() for name in ("weight", "bias")})
    plain.lm_head = head
    found = {}
    real = backend._step
    backend._step = lambda *given: (
        found.update({n: p.grad.clone() for n, p in backend._ready.model.model.named_parameters()}),
        real(*given),
    )
    batch, cache = image_batch(samples), PixelCache(lambda: processor)
    parts = [np.array([0, 1, 2, 7]), np.array([3, 4]), np.array([5, 6])]
    scored = backend.forward_only([pack_micro_batch(batch, part, pixels=cache) for part in parts])
    total, required = torch.zeros(()), []
    for sample in samples:
        pixels = [processor.pixels(image) for image in sample.prompt.images]
        values = image_logits_of(plain, pixels, sample.prompt.token_ids, sample.response_tokens)[:, 0]
        total = total - (values * torch.from_numpy(sample.loss_mask.astype(np.float64))).sum()
        required.append(values.detach().numpy())
    for part, scores in zip(parts, scored, strict=True):
        np.testing.assert_allclose(scores.values, np.concatenate([required[n] for n in part]), atol=1e-5)
    total.backward()
    backend.train_step([pack_micro_batch(batch, part, pixels=cache) for part in parts], Sum(reads_values=True))
    gradients = {name.replace("lm_head.", "score."): p.grad for name, p in plain.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for name, gradient in gradients.items():
        if name.endswith("embed_tokens.weight"):
            gradient = gradient[:-1].index_add(0, torch.tensor([IMAGE_TOKEN]), gradient[-1:])
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * largest, err_msg=name)
    assert found.keys() == gradients.keys()
    # The saved model is loaded again.
    trained = backend.forward_only([pack_micro_batch(batch, np.arange(8), pixels=cache)])[0].values
    backend.save_hf(tmp_path / "trained")
    backend.close()
    again = backend_of(tmp_path / "trained", head="value")
    np.testing.assert_array_equal(
        again.forward_only([pack_micro_batch(batch, np.arange(8), pixels=cache)])[0].values, trained
    )
    again.close()


def test_images_behind_trained_tokens(folder, processor, plain):
    """A conversation: the second image follows the first response. Compared with transformers, turn by turn."""
    first, second = noise(8, 8, 0), noise(20, 9, 1)
    before = image_prompt(processor, 0, 9, first, 10)
    through = image_prompt(processor, 0, 9, first, 10, 11, 12, second, 13)
    tokens = np.array([*through.token_ids, 14, 15], np.int32)
    starts = np.flatnonzero(np.diff(np.concatenate([[0], tokens == IMAGE_TOKEN])) == 1).tolist()
    images = tuple(replace(image, places=(start,)) for image, start in zip((first, second), starts, strict=True))
    length = len(before.token_ids)
    sample = replace(
        image_sample(replace(before, images=images), 0, tokens[length:].tolist()),
        loss_mask=np.isin(np.arange(len(tokens) - length), [0, 1, len(tokens) - length - 1]).astype(np.uint8),
    )
    pixels = [processor.pixels(image) for image in images]
    with torch.no_grad():
        early = image_log_probs_of(plain, pixels[:1], before.token_ids, [11, 12])
        late = image_log_probs_of(plain, pixels, through.token_ids, [14, 15])
    for options in ({}, {"share_prompts": False}):
        backend = backend_of(folder, **options)
        micro = pack_micro_batch(image_batch([sample]), np.arange(1), pixels=PixelCache(lambda: processor))
        found = backend.forward_only([micro])[0].log_probs
        np.testing.assert_allclose(found[:2], early, atol=1e-5)
        np.testing.assert_allclose(found[-2:], late, atol=1e-5)
        backend.close()


def test_videos_are_those_of_transformers(folder, processor):
    """transformers gets them as videos; the backend as images, one for every two frames. Compares log-probs and a gradient."""
    plain = load_plain_vision(folder)
    films = [[noise(16, 8, n) for n in range(5)], [noise(8, 24, n) for n in range(2)]]
    prompts = [
        video_prompt(folder, processor, 0, 9, films[0], 10),
        video_prompt(folder, processor, 1, films[1], 11, films[0], 12),
        video_prompt(folder, processor, 2, 9, films[0][::-1], 10),
    ]
    responses = [[12, 13, 14], [15, 16], [12, 13, 14]]
    samples = [
        image_sample(prompt, n, response) for n, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    required = []
    for sample in samples:
        pixels = [processor.pixels(video) for video in sample.prompt.images]
        values, grids = (np.concatenate([one.values for one in pixels]), np.stack([one.grid_thw for one in pixels]))
        required.append(video_log_probs_of(plain, values, grids, sample.prompt.token_ids, sample.response_tokens))
    (-torch.cat(required).sum()).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert float((required[0] - required[2]).detach().abs().max()) > 0.1

    backend, found = backend_of(folder), {}
    real = backend._step
    backend._step = lambda *given: (
        found.update({n: p.grad.clone() for n, p in backend._ready.model.model.named_parameters()}),
        real(*given),
    )
    micro = pack_micro_batch(image_batch(samples), np.arange(3), pixels=PixelCache(lambda: processor))
    np.testing.assert_allclose(backend.forward_only([micro])[0].log_probs, torch.cat(required).detach(), atol=1e-5)
    backend.train_step([micro], Sum())
    largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * largest, err_msg=name)
    backend.close()
