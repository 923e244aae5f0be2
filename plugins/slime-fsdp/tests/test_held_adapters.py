"""Several adapters over one base: gradients beside peft in float64, each alone beside all together to the bit, folders."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.contracts.backend import OutOfDeviceMemory
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import CheckpointError, ConfigError, ModelError, StorageError, TrainingError
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_training.adapters.shape import AdapterShape

HOLDS = {"max_adapters": 3}
ADAM = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 0.5}
SHAPE = AdapterShape(rank=3, alpha=6)


@pytest.fixture
def step(samples, pack, sequence_policy):
    """`step(backend, name, turn)`: gradients of two calls, and an optimizer step, of this adapter."""

    def taken(backend, name, turn=0, settings=StepSettings()):
        backend.use_adapter(name)
        chosen = samples[turn % 3 :]
        backend.forward_backward([pack(chosen[:2])], sequence_policy())
        backend.forward_backward([pack(chosen[2:4]), pack(chosen[4:])], sequence_policy())
        return backend.optim_step(settings)

    return taken


@pytest.fixture
def log_probs(pack, samples):
    def of(backend, name=None, **options):
        backend.use_adapter(name)
        return backend.forward_only([pack(samples)], **options)[0].log_probs

    return of


def saved(backend, name, folder, optimizer=False):
    backend.save_adapter(name, folder, optimizer)
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("family", "options", "shape"),
    [
        ("qwen3", {}, SHAPE),
        ("qwen3", {"gradient_checkpointing": True, "log_probs_chunk_size": 3, "linear": "torch"}, SHAPE),
        ("llama", {}, AdapterShape(rank=2)),
        ("qwen3_moe", {}, AdapterShape(rank=2, mlp=False)),
        ("qwen3_5_text", {}, AdapterShape(rank=2, mlp=False, unembedding=False)),
    ],
)
def test_gradients_equal_float64_peft(
    family, options, shape, folders, start, step, pack, samples, sequence_policy, sgd, oracle, log_probs, tmp_path
):
    backend = start(folders(family), HOLDS | options, sgd)
    backend.add_adapter("one", shape, 4)
    assert np.array_equal(log_probs(backend, "one"), log_probs(backend)), "a new adapter changes something"
    # From B = 0 the gradient of A is zero.
    step(backend, "one", settings=StepSettings(lr=0.05))
    step(backend, "one", settings=StepSettings(lr=0.05))
    before = saved(backend, "one", tmp_path / "before")
    backend.use_adapter("one")
    scores = log_probs(backend, "one")
    report = backend.train_step([pack(samples[:3]), pack([]), pack(samples[3:])], sequence_policy())
    after = saved(backend, "one", tmp_path / "after")
    expected = oracle(family, tmp_path / "before")
    required = {name.replace(".default.", "."): g for name, g in expected.gradients(samples).items() if g is not None}
    assert after.keys() == required.keys()
    assert any("lm_head" in name for name in required) == shape.unembedding
    assert any("mlp" in name for name in required) == shape.mlp
    for name, gradient in required.items():
        assert gradient.norm() > 1e-4, name
        found = before[name].double() - after[name].double()
        assert (found - gradient).norm() < 3e-4 * gradient.norm(), name
    norm = torch.stack([gradient.norm() for gradient in required.values()]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert report.sums["loss"] == pytest.approx(expected.loss(samples).item(), rel=1e-5)
    scored = torch.cat(expected(samples)[0]).detach().numpy()
    np.testing.assert_allclose(scores, scored, rtol=1e-5, atol=1e-5)


SHAPES = {"a": SHAPE, "b": AdapterShape(rank=1, mlp=False), "c": AdapterShape(rank=5, attention=False)}


def alone(folders, start, step, log_probs, name, tmp_path):
    """An adapter that has the backend for itself: reports of three steps, its log-probs after each, and its files."""
    backend = start(folders("qwen3"), HOLDS, ADAM)
    backend.add_adapter(name, SHAPES[name], ord(name))
    found = []
    for turn in range(3):
        report = step(backend, name, turn)
        found.append((report.grad_norm, dict(report.sums), log_probs(backend, name).tobytes()))
    return found, saved(backend, name, tmp_path / f"{name}-alone", optimizer=True)


@pytest.mark.bits
def test_what_an_adapter_computes_does_not_depend_on_the_others(
    folders, start, step, log_probs, samples, pack, sequence_policy, tmp_path
):
    expected = {name: alone(folders, start, step, log_probs, name, tmp_path) for name in SHAPES}
    backend = start(folders("qwen3"), HOLDS, ADAM)
    base = log_probs(backend).tobytes()
    for name in SHAPES:
        backend.add_adapter(name, SHAPES[name], ord(name))
    found = {name: [] for name in SHAPES}
    for turn in range(3):
        # Every call of one between the calls of the others.
        chosen = samples[turn % 3 :]
        for name in SHAPES:
            backend.use_adapter(name)
            backend.forward_backward([pack(chosen[:2])], sequence_policy())
        log_probs(backend)
        for name in reversed(SHAPES):
            backend.use_adapter(name)
            backend.forward_backward([pack(chosen[2:4]), pack(chosen[4:])], sequence_policy())
        for name in ("b", "a", "c"):
            backend.use_adapter(name)
            report = backend.optim_step()
            found[name].append((report.grad_norm, dict(report.sums)))
            assert log_probs(backend).tobytes() == base
        for name in SHAPES:
            found[name][-1] += (log_probs(backend, name).tobytes(),)
    for name, (reports, files) in expected.items():
        assert found[name] == reports
        again = saved(backend, name, tmp_path / name, optimizer=True)
        for file in ("adapter_model.safetensors", "optimizer.safetensors"):
            one, other = load_file(tmp_path / name / file), load_file(tmp_path / f"{name}-alone" / file)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert any(tensor.abs().max() > 1e-3 for key, tensor in again.items() if "lora_B" in key), files.keys()


def test_the_base_is_held_once_and_moments_belong_to_adapters(folders, start, step):
    backend = start(folders("qwen3"), HOLDS, ADAM, frozen_models={"reference": folders("qwen3")})
    trainer = backend._ready
    base = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert not [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert not trainer.frozen_models
    for name, shape in SHAPES.items():
        backend.add_adapter(name, shape, 0)
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) == base
    assert not trainer.optimizer.state
    of_b = sum(tensor.numel() for tensor in trainer.adapters.held["b"].tensors())
    step(backend, "a")
    moments = list(trainer.adapters.held["a"].tensors())
    weights = sum(parameter.numel() for parameter in trainer.adapters.held["a"].trained())
    # Two moments and a step count beside each matrix.
    assert sum(tensor.numel() for tensor in moments) == 3 * weights + len(trainer.adapters.held["a"].trained())
    assert sum(tensor.numel() for tensor in trainer.adapters.held["b"].tensors()) == of_b
    backend.remove_adapter("a")
    backend.remove_adapter("a")
    assert set(trainer.adapters.held) == {"b", "c"}


@pytest.mark.bits
def test_a_loaded_adapter_continues_to_the_bit(folders, start, step, log_probs, tmp_path):
    backend = start(folders("qwen3"), HOLDS, ADAM)
    backend.add_adapter("whole", SHAPE, 1)
    step(backend, "whole", 0)
    backend.save_adapter("whole", tmp_path / "half", True)
    step(backend, "whole", 1)
    other = start(folders("qwen3"), HOLDS, ADAM)
    assert other.load_adapter("again", tmp_path / "half", True) == 1
    step(other, "again", 1)
    assert log_probs(other, "again").tobytes() == log_probs(backend, "whole").tobytes()
    # Without its optimizer it begins anew: the first step of Adam has another size.
    assert other.load_adapter("weights", tmp_path / "half", False) == 0
    step(other, "weights", 1)
    assert log_probs(other, "weights").tobytes() != log_probs(backend, "whole").tobytes()
    backend.save_adapter("whole", tmp_path / "plain", False)
    with pytest.raises(CheckpointError, match="saved without its optimizer"):
        other.load_adapter("third", tmp_path / "plain", True)
    assert set(other._ready.adapters.held) == {"again", "weights"}


def test_an_adapter_of_peft_can_be_loaded(folders, adapters, start, log_probs, samples, oracle):
    backend = start(folders("qwen3"), HOLDS)
    backend.load_adapter("peft", adapters("qwen3"), False)
    scored = torch.cat(oracle("qwen3", adapters("qwen3"))(samples)[0]).detach().numpy()
    np.testing.assert_allclose(log_probs(backend, "peft"), scored, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        StepSettings(lr=0.02, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.7, clip_grad=0.01),
        StepSettings(weight_decay=0.0, clip_grad=0.0),
        StepSettings(),
    ],
)
def test_settings_of_a_call_are_those_of_torch(settings, folders, start, samples, pack, sequence_policy, tmp_path):
    """Beside torch's AdamW with these settings, over steps with the run's before and after."""
    backend = start(folders("qwen3"), HOLDS, ADAM)
    backend.add_adapter("one", SHAPE, 1)
    backend.use_adapter("one")
    held = backend._ready.adapters.held["one"]
    twins = [parameter.detach().clone().requires_grad_() for parameter in held.trained()]
    torchs = torch.optim.AdamW(twins)
    for given in (StepSettings(), settings, StepSettings()):
        backend.forward_backward([pack(samples)], sequence_policy())
        for twin, parameter in zip(twins, held.trained(), strict=True):
            twin.grad = parameter.grad.clone()
        limit = ADAM["clip_grad"] if given.clip_grad is None else given.clip_grad
        if limit:
            torch.nn.utils.clip_grad_norm_(twins, limit)
        for group in torchs.param_groups:
            group["lr"] = given.lr or ADAM["lr"]
            group["betas"] = given.betas or (0.9, 0.98)
            group["eps"] = given.eps or 1e-8
            group["weight_decay"] = ADAM["weight_decay"] if given.weight_decay is None else given.weight_decay
        torchs.step()
        assert backend.optim_step(given).lr == (given.lr or ADAM["lr"])
        for twin, parameter in zip(twins, held.trained(), strict=True):
            torch.testing.assert_close(parameter.detach(), twin.detach(), rtol=1e-5, atol=1e-7)


def test_settings_of_a_call_for_whole_models(folders, start, samples, pack, sequence_policy, weights_of):
    """Norms are vectors and do not decay; the step after has the run's settings again."""
    results = []
    for run, given in (
        (ADAM, StepSettings(lr=0.02, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.7, clip_grad=0.01)),
        (
            {
                "lr": 0.02,
                "adam_beta1": 0.5,
                "adam_beta2": 0.6,
                "adam_eps": 1e-3,
                "weight_decay": 0.7,
                "clip_grad": 0.01,
            },
            StepSettings(),
        ),
    ):
        backend = start(folders("qwen3"), {}, run)
        backend.forward_backward([pack(samples)], sequence_policy())
        backend.optim_step(given)
        results.append(weights_of(backend))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_error_of_memory_keeps_what_was_added_up(
    folders, start, samples, pack, sequence_policy, monkeypatch, log_probs
):
    results = []
    for fails in (False, True):
        backend = start(folders("qwen3"), HOLDS, ADAM)
        backend.add_adapter("one", SHAPE, 1)
        backend.use_adapter("one")
        backend.forward_backward([pack(samples[:3])], sequence_policy())
        if fails:
            with pytest.raises(OutOfDeviceMemory):
                backend.forward_backward([pack(samples[:2]), pack(samples)], TooLarge(sequence_policy()))
        backend.forward_backward([pack(samples[3:])], sequence_policy())
        report = backend.optim_step()
        results.append((report.grad_norm, dict(report.sums), log_probs(backend, "one").tobytes()))
    assert results[0] == results[1]


def test_gradients_of_several_calls_add_up(folders, start, samples, pack, sequence_policy):
    micros = [pack(samples[:3]), pack(samples[3:5]), pack(samples[5:])]
    reports = []
    for calls in ([micros], [micros[:1], micros[1:]], [[micro] for micro in micros]):
        backend = start(folders("qwen3"), HOLDS, ADAM)
        backend.add_adapter("one", SHAPE, 1)
        backend.use_adapter("one")
        for call in calls:
            backend.forward_backward(call, sequence_policy())
        gradients = [parameter.grad.clone() for parameter in backend._ready.adapters.held["one"].trained()]
        reports.append((backend.optim_step(), gradients))
    (whole, expected), *others = reports
    for report, gradients in others:
        assert report.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert report.sums == pytest.approx(whole.sums, rel=1e-5)
        for found, one in zip(gradients, expected, strict=True):
            assert (found - one).norm() <= 1e-5 * whole.grad_norm


class TooLarge:
    reads_values, needs_entropy, entropy_has_gradient = False, True, True

    def __init__(self, policy):
        self.policy, self.calls = policy, 0

    def __call__(self, *given, **named):
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("no memory")
        return self.policy(*given, **named)


def test_what_cannot_be_done(folders, start, samples, pack, sequence_policy, tmp_path):
    backend = start(folders("qwen3"), HOLDS, ADAM)
    with pytest.raises(TrainingError, match=r"frozen \(backend.max_adapters\)"):
        backend.forward_backward([pack(samples)], sequence_policy())
    backend.add_adapter("one", SHAPE, 1)
    with pytest.raises(ConfigError, match=r'"two": this trainer does not hold it\. It holds: one'):
        backend.use_adapter("two")
    with pytest.raises(ConfigError, match='"one": the name is in use'):
        backend.add_adapter("one", SHAPE, 1)
    backend.use_adapter("one")
    with pytest.raises(TrainingError, match="without gradients"):
        backend.optim_step()
    for name in ("two", "three"):
        backend.add_adapter(name, SHAPE, 1)
    with pytest.raises(ConfigError, match=r"holds 3 already. Remove one, or set a larger backend.max_adapters"):
        backend.add_adapter("four", SHAPE, 1)
    backend.remove_adapter("three")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        backend.save_adapter("one", tmp_path / "file" / "adapter", True)
    backend.save_adapter("one", tmp_path / "one", False)
    config = json.loads((tmp_path / "one/adapter_config.json").read_text())
    (tmp_path / "one/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ModelError, match="use_dora: only plain LoRA"):
        backend.load_adapter("three", tmp_path / "one", False)
    with pytest.raises(ModelError, match=r"nowhere: it cannot be read as an adapter: FileNotFound"):
        backend.load_adapter("three", tmp_path / "nowhere", False)
    (tmp_path / "one/adapter_config.json").write_text(json.dumps(config))
    weights = tmp_path / "one/adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt", "slime_parts": "{"})
    with pytest.raises(ModelError, match="one: it cannot be read as an adapter: JSONDecodeError"):
        backend.load_adapter("three", tmp_path / "one", False)
    moe = start(folders("qwen3_moe"), HOLDS, ADAM)
    with pytest.raises(ModelError, match=r"mlp = True: Qwen3MoeForCausalLM has no linear layers there"):
        moe.add_adapter("one", SHAPE, 1)
    with pytest.raises(ConfigError, match="max_adapters"):
        start(folders("qwen3")).add_adapter("one", SHAPE, 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lora_rank": 2}, "leave lora_rank"),
        ({"compile": True}, "Leave backend.compile out"),
        ({"exp_avg_dtype": "bf16"}, "stay in float32"),
        ({"freeze_params_name_list": ("a",)}, "Leave backend.freeze_params_name_list out"),
    ],
)
def test_options_that_conflict(options, problem):
    problems = Fsdp.problems(FsdpConfig(max_adapters=2, **options), 1, {"model_type": "qwen3"})
    assert any("backend.max_adapters = 2" in one and problem in one for one in problems)
    assert Fsdp.max_adapters(FsdpConfig(max_adapters=2)) == 2
