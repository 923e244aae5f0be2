"""Weights and moments in bfloat16: close to a run with float32, resumed to the same bits, refused where it makes no sense."""

from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

from slime_core.errors import ConfigError
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp

ADAM = {"lr": 0.003, "weight_decay": 0.1}
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
HALF = {"precision": "bfloat16"}
ALL = HALF | MOMENTS | {"main_params_dtype": "bf16"}


@pytest.fixture
def begin(folders, start):
    """Starts backends that are closed with the test: lower precision requires a process group."""
    begun = []

    def begin(options):
        begun.append(start(folders("qwen3"), options, ADAM))
        return begun[-1]

    yield begin
    for backend in reversed(begun):
        backend.close()


@pytest.fixture
def train(pack, samples, sequence_policy):
    def steps(backend, count):
        micros = [pack(samples[:3]), pack(samples[3:5]), pack(samples[5:])]
        return [backend.train_step(micros, sequence_policy()) for _ in range(count)]

    return steps


def distance(one, other):
    """Norm of the difference of all weights together."""
    return float(torch.stack([(one[name].double() - other[name].double()).norm() for name in one]).norm())


@pytest.mark.parametrize(("plain", "rounded", "share"), [({}, MOMENTS, 0.02), (HALF, ALL, 0.35)])
def test_steps_follow_those_of_float32_state(plain, rounded, share, begin, weights_of, train):
    expected = begin(plain)
    found = begin(rounded)
    before = weights_of(expected)
    reports, rounded_reports = train(expected, 6), train(found, 6)
    assert rounded_reports[0].grad_norm == pytest.approx(reports[0].grad_norm, rel=1e-2)
    moved = distance(weights_of(expected), before)
    assert 0 < distance(weights_of(found), weights_of(expected)) < share * moved


def test_gradients_of_micro_batches_are_added_in_float32(begin, pack, samples, sequence_policy):
    """32 micro-batches of a 512th each are added to a gradient whose neighbours in bfloat16 are a 256th or more away."""
    backend = begin(ALL | {"sync_each_micro_batch": True})
    small = [replace(sample, weight=sample.weight / 512) for sample in samples]
    # Not finite: nothing is changed.
    poisoned = sequence_policy(poison=float("nan"))
    one = backend.train_step([pack(samples)], poisoned).grad_norm
    all_of_them = backend.train_step([pack(samples), *[pack(small)] * 32], poisoned).grad_norm
    assert all_of_them == pytest.approx(one * (1 + 32 / 512), rel=3e-3)


@pytest.mark.bits
def test_resume_gives_the_same_bits(begin, weights_of, train, tmp_path):
    straight = begin(ALL)
    train(straight, 2)
    straight.save(tmp_path)
    with safe_open(next(tmp_path.glob("state/*.safetensors")), "pt") as saved:
        kept = {name: saved.get_slice(name).get_dtype() for name in saved.keys()}  # noqa: SIM118
    assert {kept[name] for name in kept if ".step." not in name} == {"BF16"}
    train(straight, 2)
    resumed = begin(ALL)
    train(resumed, 1)
    resumed.load(tmp_path)
    train(resumed, 2)
    assert distance(weights_of(straight), weights_of(resumed)) == 0


def test_what_is_refused(folders, start, sgd):
    def problems(**options):
        return Fsdp.problems(FsdpConfig(**options), 1, {"model_type": "qwen3"})

    assert not problems(**ALL)
    assert "precision" in problems(main_params_dtype="bf16", precision="float32")[0]
    assert "adapters" in problems(main_params_dtype="bf16", lora_rank=2)[0]
    with pytest.raises(ConfigError, match="precision = "):
        start(folders("qwen3"), {"main_params_dtype": "bf16"})
    with pytest.raises(ConfigError, match=r'train\.optimizer = "sgd"'):
        start(folders("qwen3"), MOMENTS, sgd)
