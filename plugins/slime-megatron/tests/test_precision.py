"""Half precision beside float32, and the loss scale of float16."""

import math

import pytest
import torch

from slime_core.testing.tiny_model import make_tiny_model
from slime_core.testing.tiny_training import SPLITS, Place, TrainingBatch, objective_of, opened
from slime_megatron.plugin import Megatron

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(model=make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def backend(**options):
    return Megatron.build(Megatron.Config(**options))


def step(place, **options):
    training = TrainingBatch.make()
    with opened(backend(**options), place) as one:
        before = {name: tensor.float() for name, tensor in one.weights().items()}
        report = one.backend.train_step(training.micros(SPLITS[0]), objective_of())
        after = {name: tensor.float() for name, tensor in one.weights().items()}
    return torch.cat([(before[name] - after[name]).flatten() for name in before]), report


@pytest.mark.parametrize(
    ("options", "apart"),
    [({"bf16": True}, 0.06), ({"fp16": True, "initial_loss_scale": 2.0**8}, 0.02)],
    ids=["bf16", "fp16"],
)
def test_gradients_are_near_to_those_in_float32(place, options, apart):
    """The optimiser steps on float32 weights; what is exported is rounded."""
    expected, _ = step(place)
    got, report = step(place, **options)
    assert not report.skipped
    assert float((got - expected).norm() / expected.norm()) < apart


def test_a_step_that_is_not_finite_halves_the_loss_scale(place):
    training = TrainingBatch.make()
    with opened(backend(fp16=True, initial_loss_scale=2.0**10, hysteresis=1), place) as one:
        scale = one.backend._trainer.optimizer.get_loss_scale
        before = one.weights()
        assert float(scale()) == 2.0**10
        report = one.backend.train_step(training.micros(), objective_of(poison=math.inf))
        assert report.skipped
        assert float(scale()) == 2.0**9
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.weights().items())
        assert not one.backend.train_step(training.micros(), objective_of()).skipped
        assert float(scale()) == 2.0**9
