"""The optimizer step: skipping, clipping, the schedule, frozen parameters, copies."""

import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.errors import CheckpointError, ConfigError, ModelError
from slime_fsdp.optimizer import learning_rate
from slime_training.rounded_adamw import local


@pytest.mark.bits
def test_a_step_that_is_not_finite_changes_nothing(
    folders, start, pack, samples, weights_of, sequence_policy, tmp_path
):
    backend = start(folders("qwen3"))
    backend.train_step([pack(samples)], sequence_policy())
    before = weights_of(backend)
    for poison in (float("nan"), float("inf")):
        report = backend.train_step([pack(samples[:3]), pack(samples[3:])], sequence_policy(poison=poison))
        assert report.skipped
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(backend).items())
    report = backend.train_step([pack(samples)], sequence_policy())
    assert not report.skipped
    other = start(folders("qwen3"))
    for _ in range(2):
        other.train_step([pack(samples)], sequence_policy())
    assert all(torch.equal(weight, weights_of(other)[name]) for name, weight in weights_of(backend).items())


def test_a_gradient_that_is_not_finite_is_skipped_too(folders, start, pack, samples, weights_of, sequence_policy):
    backend = start(folders("qwen3"))
    before = weights_of(backend)
    micro = pack(samples)
    micro.columns.advantages[0] = float("inf")
    assert backend.train_step([micro], sequence_policy()).skipped
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(backend).items())


def test_a_moment_that_is_not_finite_is_reported(folders, start, pack, samples, weights_of, sequence_policy, tmp_path):
    backend = start(folders("qwen3"))
    assert backend.train_step([pack(samples)], sequence_policy()).nonfinite is None
    norm = backend._ready.model.model.model.norm.weight
    backend._ready.optimizer.state[norm]["exp_avg_sq"][3] = math.inf
    report = backend.train_step([pack(samples)], sequence_policy())
    assert not report.skipped
    assert report.nonfinite == "exp_avg_sq of model.norm.weight is not finite"
    assert all(weight.isfinite().all() for weight in weights_of(backend).values())
    # A checkpoint that an earlier version wrote of such a state.
    backend.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"exp_avg_sq of model.norm.weight is not finite. Resume .* --ckpt-step"):
        start(folders("qwen3")).load(tmp_path)


def test_a_folder_whose_weights_are_not_finite_is_refused(folders, start, tmp_path):
    shutil.copytree(folders("qwen3"), tmp_path / "spoilt")
    weights = load_file(tmp_path / "spoilt" / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, tmp_path / "spoilt" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"spoilt: weight model.norm.weight is not finite, so it cannot be trained"):
        start(tmp_path / "spoilt")


def test_a_weight_that_its_export_cannot_hold_is_reported(folders, start, weights_of):
    """In float32 it is finite; engines get bfloat16, in which it is not."""
    backend = start(folders("qwen3"), {"precision": "bfloat16"})
    assert backend._nonfinite() is None
    with torch.no_grad():
        local(backend._ready.model.model.model.norm.weight)[3] = 3.4e38
    assert weights_of(backend)["model.norm.weight"].isinf().any()
    assert (
        backend._nonfinite()
        == "weight model.norm.weight has values up to 3.4e+38, which bfloat16 or float32 cannot hold"
    )


@pytest.mark.parametrize("limit", [0.0, 1e-3, 1e6])
def test_clipping_scales_the_whole_gradient(limit, folders, start, pack, samples, weights_of, sequence_policy, sgd):
    backend = start(folders("qwen3"), None, sgd | {"clip_grad": limit})
    before = weights_of(backend)
    report = backend.train_step([pack(samples)], sequence_policy())
    after = weights_of(backend)
    moved = torch.stack([(after[name].double() - before[name].double()).norm() for name in before]).norm()
    assert report.grad_norm > 0.1
    required = min(limit, report.grad_norm) if limit else report.grad_norm
    assert moved.item() == pytest.approx(required, rel=1e-3)


def test_adamw_equals_a_float64_one_without_decay_on_vectors(
    folders, start, pack, samples, weights_of, sequence_policy, oracle
):
    chosen = {"lr": 0.01, "weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-4, "clip_grad": 0.0}
    backend = start(folders("llama"), None, chosen)
    expected = oracle("llama")
    state = {}
    for t in range(1, 4):
        backend.train_step([pack(samples)], sequence_policy())
        gradients = expected.gradients(samples)
        with torch.no_grad():
            for name, parameter in expected.model.named_parameters():
                m, v = state.get(name, (0.0, 0.0))
                m, v = 0.8 * m + 0.2 * gradients[name], 0.9 * v + 0.1 * gradients[name] ** 2
                state[name] = m, v
                if parameter.ndim > 1:
                    parameter *= 1 - 0.01 * 0.3
                parameter -= 0.01 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-4)
    found = weights_of(backend)
    for name, parameter in expected.model.named_parameters():
        torch.testing.assert_close(found[name].double(), parameter.detach(), rtol=1e-4, atol=2e-5)


def test_learning_rates():
    def rates(steps, **options):
        config = OptimizerConfig(lr=1.0, **options)
        return [round(learning_rate(config, step, 8), 6) for step in steps]

    assert rates([0, 5, 100]) == [1, 1, 1]
    assert rates([0, 1, 2, 3, 9], lr_warmup_iters=2) == [0, 0.5, 1, 1, 1]
    assert rates([0, 4, 8, 9], lr_decay_style="linear") == [1, 0.5, 0, 0]
    assert rates([2, 5, 8], lr_decay_style="linear", lr_warmup_iters=2, min_lr=0.1) == [1, 0.55, 0.1]
    assert rates([0, 1, 2, 3, 4, 5], lr_decay_style="cosine", lr_decay_iters=4, min_lr=0.2) == [
        1,
        0.882843,
        0.6,
        0.317157,
        0.2,
        0.2,
    ]
    # Megatron's: a quarter of eight steps, then of the four until min_lr; the last warm-up ends between two steps.
    assert rates([0, 1, 2, 5, 8], lr_decay_style="linear", lr_warmup_fraction=0.25) == [0, 0.5, 1, 0.5, 0]
    assert rates([0, 1, 4], lr_decay_style="linear", lr_decay_iters=4, lr_warmup_fraction=0.25) == [0, 1, 0]
    assert rates([1, 2, 5], lr_decay_style="linear", lr_warmup_fraction=0.1875) == [0.666667, 0.923077, 0.461538]


def test_the_report_has_the_learning_rate_of_its_step(folders, start, pack, samples, sequence_policy):
    backend = start(folders("qwen3"), None, {"lr": 0.01, "lr_warmup_iters": 2})
    reports = [backend.train_step([pack(samples)], sequence_policy()) for _ in range(4)]
    assert [report.lr for report in reports] == pytest.approx([0, 0.005, 0.01, 0.01])
    assert all(report.seconds > 0 for report in reports)


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        (
            {"freeze_params_name_list": ["embed", r"layers\.0\."]},
            lambda name: "embed" not in name and ".0." not in name,
        ),
        ({"only_train_params_name_list": [r"layers\.1\.mlp"]}, lambda name: "layers.1.mlp" in name),
    ],
)
def test_frozen_parameters_stay(options, moves, folders, start, pack, samples, weights_of, sequence_policy):
    backend = start(folders("llama"), options)
    before = weights_of(backend)
    backend.train_step([pack(samples)], sequence_policy())
    changed = {name for name, weight in weights_of(backend).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if moves(name)}


def test_nothing_left_to_train_is_an_error(folders, start):
    with pytest.raises(ConfigError, match="no parameter to train"):
        start(folders("llama"), {"only_train_params_name_list": ["no such name"]})


@pytest.mark.bits
def test_sleep_and_wake_change_nothing_on_the_cpu(folders, start, pack, samples, sequence_policy):
    backend = start(folders("qwen3"))
    backend.train_step([pack(samples)], sequence_policy())
    before = backend.forward_only([pack(samples)])[0].log_probs
    backend.sleep()
    backend.wake_up()
    np.testing.assert_array_equal(backend.forward_only([pack(samples)])[0].log_probs, before)


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bfloat16", "main_params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}],
    ids=["float32", "bfloat16"],
)
def test_host_memory_for_the_moments_is_there_before_the_first_step(
    options, folders, start, pack, samples, sequence_policy
):
    """Else the sleep after the first step would wait until it is locked, for many seconds."""
    backend = start(folders("qwen3"), options)
    backend.sleep()
    kept = backend._ready.offloader._moments._memory
    kept.room(0)
    reserved = kept._memory
    backend.wake_up()
    backend.train_step([pack(samples)], sequence_policy())
    state = backend._ready.optimizer.state.values()
    moments = sum(local(value).nbytes for of_one in state for value in of_one.values())
    assert moments < len(reserved) < 2 * moments, "beside small tensors, whose bytes are rounded up"
    backend.sleep()
    assert kept._memory is reserved
    assert not any(local(value).untyped_storage().nbytes() for of_one in state for value in of_one.values())
    backend.wake_up()
    assert kept._memory is reserved


def test_two_backends_share_a_process_group(folders, start, pack, samples):
    first, second = (start(folders("qwen3"), {"precision": "bfloat16"}) for _ in range(2))
    second.close()
    assert torch.distributed.is_initialized()
    first.forward_only([pack(samples)])
    first.close()
    assert not torch.distributed.is_initialized()
