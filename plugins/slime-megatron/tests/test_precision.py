"""Half precision beside float32, and the loss scale of float16."""

import math

import pytest
import torch

from slime_core.errors import ConfigError
from slime_core.testing.tiny_model import make_tiny_model
from slime_core.testing.tiny_training import ADAM, SPLITS, Place, TrainingBatch, objective_of, opened
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


def test_moments_in_bfloat16(place):
    """Beside float32 weights, whatever is computed in; the state has half the bytes."""
    training = TrainingBatch.make()
    weights = {}
    for name, options in {"float32": {}, "moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}}.items():
        with opened(backend(bf16=True, **options), place, optimizer=ADAM) as one:
            for _ in range(4):
                one.backend.train_step(training.micros(), objective_of())
            from slime_megatron.optimizer import parts_of

            state = [s for part in parts_of(one.backend._trainer.optimizer) for s in part.optimizer.state.values()]
            assert {s["exp_avg_sq"].dtype for s in state} == {torch.bfloat16 if options else torch.float32}
            weights[name] = torch.cat([tensor.float().flatten() for tensor in one.weights().values()])
    apart = (weights["moments"] - weights["float32"]).norm() / weights["float32"].norm()
    assert 0 < float(apart) < 2e-3


def test_moments_are_refused_where_there_are_none(place):
    with pytest.raises(ConfigError, match="no moments"), opened(backend(exp_avg_dtype="bf16"), place):
        pass
    with (
        pytest.raises(ConfigError, match="everything is on the host"),
        opened(backend(optimizer_cpu_offload=True), place),
    ):
        pass
    told = Megatron.problems(
        Megatron.Config(exp_avg_dtype="bf16", optimizer_cpu_offload=True), 1, {"model_type": "qwen3"}
    )
    assert "backend.optimizer_cpu_offload = true" in told[0]
