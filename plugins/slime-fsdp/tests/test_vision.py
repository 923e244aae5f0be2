"""Images against transformers' Qwen3VLForConditionalGeneration, run unpacked, one sample at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.batch.pack import pack_micro_batch
from slime_core.batch.pack_images import PixelCache
from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import ObjectiveOutput, TrainerSetup
from slime_core.image_processor import ImageProcessor
from slime_core.testing.tiny_vision import (
    IMAGE_TOKEN,
    image_batch,
    image_log_probs_of,
    image_samples,
    load_plain_vision,
    make_tiny_vision_model,
    with_stand_in,
)
from slime_fsdp.backend import FsdpBackend
from slime_fsdp.plugin import FsdpConfig


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
    """(R,) by transformers alone."""
    pixels = [processor.pixels(image) for image in sample.prompt.images]
    return image_log_probs_of(plain, pixels, sample.prompt.token_ids, sample.response_tokens)


def backend_of(folder, *, lr=1e-2, **options):
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
        )
    )
    return backend


class Sum:
    """Minus the sum of the trained log-probs."""

    reads_values = wants_entropy = entropy_has_gradient = False

    def __call__(self, micro, *, segments, log_probs=None, entropy=None, values=None):
        return ObjectiveOutput(loss=-(log_probs * micro.mask).sum(), sums={})


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"attn_implementation": "eager"}])
def test_log_probs_are_those_of_samples_alone(folder, processor, plain, samples, options):
    with torch.no_grad():
        wanted = torch.cat([log_probs_of(plain, processor, sample) for sample in samples])
    batch = image_batch(samples)
    cache = PixelCache(lambda: processor)
    # Without images in one micro-batch, and in parts: neither changes anything.
    parts = [np.arange(8), np.array([7]), np.array([2, 5])]
    backend = backend_of(folder, **options)
    scored = backend.score([pack_micro_batch(batch, part, pixels=cache) for part in parts])
    of_sample = wanted.split([sample.response_length for sample in samples])
    for part, scores in zip(parts, scored, strict=True):
        expected = torch.cat([of_sample[number] for number in part]).numpy()
        np.testing.assert_allclose(scores.log_probs, expected, atol=1e-5)
    # It would show if images were left out.
    blind = backend.score([pack_micro_batch(replace(batch, images=None), np.arange(8))])
    assert np.abs(blind[0].log_probs - wanted.numpy()).max() > 0.1
    backend.close()


def test_gradients_are_those_of_samples_alone(folder, processor, samples):
    plain = with_stand_in(load_plain_vision(folder, torch.float32))
    total = torch.zeros(())
    for sample in samples:
        chosen = log_probs_of(plain, processor, sample)
        total = total - (chosen * torch.from_numpy(sample.loss_mask.astype(np.float32))).sum()
    total.backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}

    backend = backend_of(folder)
    found = {}
    real = backend._step
    backend._step = lambda parameters, norm, lr: (
        found.update({n: p.grad.clone() for n, p in backend._ready.model.model.named_parameters()}),
        real(parameters, norm, lr),
    )
    batch = image_batch(samples)
    cache = PixelCache(lambda: processor)
    parts = [np.array([0, 1, 2, 7]), np.array([3, 4]), np.array([5, 6])]
    backend.train_step([pack_micro_batch(batch, part, pixels=cache) for part in parts], Sum())
    largest = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    for name, gradient in wanted.items():
        if name.endswith("embed_tokens.weight"):
            gradient = gradient[:-1].index_add(0, torch.tensor([IMAGE_TOKEN]), gradient[-1:])
        np.testing.assert_allclose(found[name], gradient, atol=2e-5 * largest, err_msg=name)
    visual = [float(found[name].abs().max()) for name in found if ".visual." in name]
    assert len(visual) > 20
    assert min(visual[:-1]) > 0
    backend.close()
