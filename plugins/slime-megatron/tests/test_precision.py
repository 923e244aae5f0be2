"""Half precision against float32, and the loss scale of float16."""

import json
import math
import re

import pytest
import torch
from families import make_family
from safetensors.torch import load_file, save_file

from slime_core.errors import ConfigError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import ADAM, MASKED, SPLITS, WHOLE, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

BIAS = re.compile(r"e_score_correction_bias$")


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
    [({"bf16": True}, 0.06), ({"fp16": True, "initial_loss_scale": 2.0**12}, 0.02)],
    ids=["bf16", "fp16"],
)
def test_gradients_are_near_to_those_in_float32(place, options, apart):
    """The optimizer steps on float32 weights; exports are rounded."""
    expected, _ = step(place)
    got, report = step(place, **options)
    assert not report.skipped
    assert float((got - expected).norm() / expected.norm()) < apart


@pytest.fixture(scope="module")
def with_biases(tmp_path_factory):
    """In bfloat16, except for the biases of its routers, like the released model."""
    folder = make_family(tmp_path_factory.mktemp("model") / "deepseek", "deepseek-v3")
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    for name in filter(BIAS.search, weights):
        weights[name] = torch.linspace(7.0, 8.0, len(weights[name])) + 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    return folder, weights


def test_routers_keep_their_biases_in_float32(with_biases, tmp_path):
    """Between 7 and 8 bfloat16 has 32 numbers. The counts of routers must not be rounded either: 256 + 1 is 256 in bfloat16."""
    folder, weights = with_biases
    training = TrainingBatch.make()
    with opened(backend(bf16=True), Place(model=folder)) as one:
        at_start = one.weights()
        one.scores(training)
        one.backend.save_hf(tmp_path / "saved")
        counts = [
            buffer.dtype
            for chunk in one.backend._trainer.bare
            for name, buffer in chunk.named_buffers()
            if name.endswith("local_tokens_per_expert")
        ]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert len(counts) == 3
    assert set(counts) == {torch.float32}
    assert saved.keys() == at_start.keys() == weights.keys()
    for name, tensor in weights.items():
        assert saved[name].dtype == tensor.dtype, name
        assert torch.equal(saved[name], tensor), name
        assert torch.equal(at_start[name], tensor), name


def test_a_step_that_is_not_finite_leaves_the_biases_of_routers(with_biases):
    folder, weights = with_biases
    training = TrainingBatch.make()
    with opened(backend(bf16=True, moe_router_bias_update_rate=0.125), Place(model=folder)) as one:
        report = one.backend.train_step(training.micros(), objective_of(poison=math.nan))
        skipped = one.weights()
        assert report.skipped
        assert not one.backend.train_step(training.micros(), objective_of()).skipped
        stepped = one.weights()
    biases = list(filter(BIAS.search, weights))
    assert len(biases) == 3
    for name in biases:
        assert torch.equal(skipped[name], weights[name]), name
        # Up or down by the rate, or not at all.
        moved = 8 * (stepped[name] - weights[name])
        torch.testing.assert_close(moved, moved.round(), rtol=0, atol=1e-4)
        assert moved.round().abs().max() == 1, name


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_a_moment_that_is_not_finite_is_reported(place, options):
    from slime_megatron.optimizer import parts_of

    training = TrainingBatch.make()
    with opened(backend(**options), place, optimizer=ADAM) as one:
        assert one.backend.train_step(training.micros(), objective_of()).nonfinite is None
        trainer = one.backend._ready
        norm = trainer.tensors["decoder.final_layernorm.weight"]
        (part,) = parts_of(trainer.optimizer)
        part.optimizer.state[getattr(norm, "main_param", norm)]["exp_avg_sq"][3] = math.inf
        report = one.backend.train_step(training.micros(), objective_of())
        assert not report.skipped
        assert report.nonfinite == "exp_avg_sq of decoder.final_layernorm.weight is not finite"
        assert all(tensor.isfinite().all() for tensor in one.weights().values())


def test_gradients_that_overflow_halve_the_loss_scale(place):
    """No weight changes until they fit."""
    training = TrainingBatch.make()
    with opened(backend(fp16=True, initial_loss_scale=2.0**20, hysteresis=1), place) as one:
        scale = one.backend._trainer.optimizer.get_loss_scale
        before = one.weights()
        expected = 2.0**20
        assert float(scale()) == expected
        while one.backend.train_step(training.micros(), objective_of()).skipped:
            expected /= 2
            assert float(scale()) == expected
            assert all(torch.equal(tensor, before[name]) for name, tensor in one.weights().items())
        # The limit of a mean over tokens: no logit has a larger gradient than its token's share.
        assert 2.0**14 <= expected < 2.0**20
        assert float(scale()) == expected


def test_a_loss_scale_is_saved_and_loaded(place, tmp_path):
    """Megatron's own function loads it to a GPU."""
    training = TrainingBatch.make()
    options = {"fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1}
    with opened(backend(**options), place) as one:
        while one.backend.train_step(training.micros(), objective_of()).skipped:
            pass
        one.backend.save(tmp_path)
        scaler = one.backend._trainer.optimizer.chained_optimizers[0].grad_scaler
        expected, state = one.weights(), {name: float(value) for name, value in scaler.state_dict().items()}
    assert state["scale"] < 2.0**20
    assert state["growth_tracker"] == 1
    with opened(backend(**options), place) as other:
        other.backend.load(tmp_path)
        scaler = other.backend._trainer.optimizer.chained_optimizers[0].grad_scaler
        assert {name: float(value) for name, value in scaler.state_dict().items()} == state
        assert all(torch.equal(tensor, expected[name]) for name, tensor in other.weights().items())
        assert not other.backend.train_step(training.micros(), objective_of()).skipped


@pytest.fixture
def experts_apart(monkeypatch):
    """Marks the MLPs in the way in which Megatron marks experts that are sharded over other ranks."""
    from slime_megatron import trainer

    wrap = trainer.wrap

    def wrap_marked(bare, *given, **kwargs):
        for name, parameter in bare[0].named_parameters():
            parameter.allreduce = ".mlp." not in name
        return wrap(bare, *given, **kwargs)

    monkeypatch.setattr(trainer, "wrap", wrap_marked)


@pytest.mark.parametrize("overflowing", [0, 1])
def test_experts_with_an_optimizer_of_their_own_have_the_same_loss_scale(
    place, experts_apart, monkeypatch, overflowing
):
    from slime_megatron.optimizer import parts_of

    training = TrainingBatch.make()
    with opened(backend(fp16=True, loss_scale=2.0**8), place) as one:
        expected = one.backend.train_step(training.micros(), objective_of()).grad_norm
    with opened(backend(fp16=True, initial_loss_scale=2.0**10, loss_scale_window=1, hysteresis=1), place) as one:
        parts = parts_of(one.backend._trainer.optimizer)
        assert len(parts) == 2
        scales = lambda: [float(part.get_loss_scale()) for part in parts]  # noqa: E731
        with monkeypatch.context() as context:
            context.setattr(parts[overflowing], "_unscale_main_grads_and_check_for_nan", lambda: True)
            assert one.backend.train_step(training.micros(), objective_of()).skipped
        assert scales() == [2.0**9, 2.0**9]
        report = one.backend.train_step(training.micros(), objective_of())
        assert report.grad_norm == pytest.approx(expected, rel=0.01)
        assert scales() == [2.0**10, 2.0**10]


def test_a_loss_that_is_not_finite_leaves_the_loss_scale(place):
    """The loss was computed without the scale: a smaller one fixes nothing."""
    training = TrainingBatch.make()
    with opened(backend(fp16=True, initial_loss_scale=2.0**10, hysteresis=1), place) as one:
        before = one.weights()
        assert one.backend.train_step(training.micros(), objective_of(poison=math.inf)).skipped
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.weights().items())
        assert float(one.backend._trainer.optimizer.get_loss_scale()) == 2.0**10
        assert not one.backend.train_step(training.micros(), objective_of()).skipped


def test_tokens_that_are_not_trained_do_not_change_the_loss_scale(place):
    """Gradients are as large as those of the loss, times the scale, for prompts of any length: ten times the tokens here."""
    training = TrainingBatch.make()
    prompts = ((MASKED,),) * 64
    norms = []
    for more in ((), prompts):
        with opened(backend(fp16=True, loss_scale=2.0**8), place) as one:
            report = one.backend.train_step(training.micros(WHOLE + more), objective_of())
        assert not report.skipped
        norms.append(report.grad_norm)
    assert norms[0] == norms[1]
    with opened(backend(), place) as one:
        expected = one.backend.train_step(training.micros(), objective_of()).grad_norm
    assert norms[0] == pytest.approx(expected, rel=0.01)


def test_moments_in_bfloat16(place):
    """With float32 weights, in any compute dtype; the state has half the bytes."""
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


def test_weights_in_bfloat16(place):
    """The optimizer has no copy of the weights, and follows the one with float32 weights, whose steps are at most the distance
    of two bfloat16 neighbours; gradients are summed in float32 as before."""
    training = TrainingBatch.make()
    kept = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "main_params_dtype": "bf16"}
    before, after, norms = {}, {}, {}
    for name, options in {"float32": {}, "bfloat16": kept}.items():
        with opened(backend(bf16=True, **options), place, optimizer=ADAM) as one:
            own = one.backend._trainer.tensors.values()
            before[name] = torch.cat([tensor.float().flatten() for tensor in one.weights().values()])
            norms[name] = [
                one.backend.train_step(training.micros(SPLITS[-1]), objective_of()).grad_norm for _ in range(6)
            ]
            after[name] = torch.cat([tensor.float().flatten() for tensor in one.weights().values()])
            from slime_megatron.optimizer import parts_of

            stepped = [p for part in parts_of(one.backend._trainer.optimizer) for p in part.get_parameters()]
            state = [s for part in parts_of(one.backend._trainer.optimizer) for s in part.optimizer.state.values()]
            if options:
                assert {id(tensor) for tensor in stepped} <= {id(tensor) for tensor in own}
                assert {x.dtype for s in state for x in s.values() if x.dim()} == {torch.bfloat16}
    assert norms["bfloat16"][0] == pytest.approx(norms["float32"][0], rel=1e-5)
    moved = (after["float32"] - before["float32"]).norm()
    assert 0 < (after["bfloat16"] - after["float32"]).norm() < 0.35 * moved


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fp16": True}, "Set bf16 = true"),
        ({"bf16": False}, "Set bf16 = true"),
        ({"use_distributed_optimizer": True}, "one of them out"),
        ({"optimizer_cpu_offload": True}, "backend.optimizer_cpu_offload = true"),
    ],
)
def test_weights_in_bfloat16_are_refused_beside(options, words, place):
    config = Megatron.Config(main_params_dtype="bf16", **options)
    (problem,) = Megatron.problems(config, 1, {"model_type": "qwen3"})
    assert words in problem
    with (
        pytest.raises(ConfigError, match="on the CPU it requires bf16"),
        opened(backend(main_params_dtype="bf16"), place),
    ):
        pass


def test_moments_are_refused_where_there_are_none(place):
    with pytest.raises(ConfigError, match="no moments"), opened(backend(exp_avg_dtype="bf16"), place):
        pass
    with (
        pytest.raises(ConfigError, match="everything is on the host"),
        opened(backend(optimizer_cpu_offload=True), place),
    ):
        pass
    problems = Megatron.problems(
        Megatron.Config(exp_avg_dtype="bf16", optimizer_cpu_offload=True), 1, {"model_type": "qwen3"}
    )
    assert "backend.optimizer_cpu_offload = true" in problems[0]
