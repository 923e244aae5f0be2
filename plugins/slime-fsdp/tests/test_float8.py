"""Linear layers in float8, emulated: against float64 arithmetic on the same rounded numbers, and what surrounds them."""

import math

import numpy as np
import pytest
import torch

from slime_core.errors import ModelError
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_fsdp.prefix_sharing import share_prompts
from slime_fsdp.stream_padding import padded
from slime_training.segment_table import whole_sequences

pytestmark = pytest.mark.torchao
FLOAT8 = {"fp8_recipe": "rowwise"}


def rounded(matrix, dim):
    """float64 to e4m3 with a power of 2 for each row or column, and back, by hand: four digits of a significand, exponents from
    -6, at most 448."""
    largest = matrix.abs().amax(dim, keepdim=True).clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    values = matrix * scale
    _, exponent = torch.frexp(values)
    step = torch.exp2(exponent.clamp(min=-5).double() - 4)
    return (torch.round(values / step) * step).clamp(-448, 448) / scale


@pytest.fixture
def use_float8():
    from slime_fsdp.float8_layers import use_float8

    return use_float8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_products_are_those_of_the_rounded_numbers(recipe, bias, use_float8):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(48, 32, bias=bias))
    weight = layer[0].weight.detach().double()
    shift = layer[0].bias.detach().double() if bias else 0.0
    use_float8([layer], recipe, emulate=True)
    # Rows of very different sizes, and one of zeros, as padding has.
    x = torch.randn(64, 48) * torch.logspace(-3, 3, 64)[:, None]
    x[5] = 0
    x.requires_grad_()
    gradient = torch.randn(64, 32) * torch.logspace(2, -2, 64)[:, None]
    y = layer(x)
    y.backward(gradient)
    exact, g = x.detach().double(), gradient.double()
    if recipe == "rowwise":
        of_weight, of_gradient = rounded(weight, 0), rounded(g, 0).T @ rounded(exact, 0)
    else:
        # One scale for the weight, which depends on no token.
        of_weight, of_gradient = rounded(weight.view(1, -1), 1).view_as(weight), g.T @ exact
    expected = {
        "output": (y, rounded(exact, 1) @ rounded(weight, 1).T + shift, exact @ weight.T + shift),
        "input": (x.grad, rounded(g, 1) @ of_weight, g @ weight),
        "weight": (layer[0].weight.grad, of_gradient, g.T @ exact),
    }
    for name, (found, of_rounded, plain) in expected.items():
        error = (found.double() - of_rounded).norm() / of_rounded.norm()
        assert error < 1e-6, name
        if recipe != "rowwise" and name == "weight":
            continue
        # Rounding to four digits is seen: a few percent.
        assert 0.005 < (found.double() - plain).norm() / plain.norm() < 0.06, name


def test_layers_are_in_float8_and_nothing_else(folders, start):
    backend = start(folders("qwen3"), FLOAT8)
    model = backend._ready.model.model
    kinds = {
        name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {"lm_head"}
    assert len(kinds) == 1 + 2 * 7
    assert {kind for name, kind in kinds.items() if name != "lm_head"} == {"Float8Linear"}


def test_log_probs_and_gradients_are_close_to_those_without(
    folders, start, pack, samples, weights_of, sequence_policy, sgd
):
    plain, float8 = (start(folders("qwen3"), options, sgd) for options in ({}, FLOAT8))
    expected, found = (one.forward_only([pack(samples)])[0].log_probs for one in (plain, float8))
    # Random weights, of which eight bits move log-probs by more than those of a trained model.
    assert 1e-3 < np.abs(found - expected).mean() < 0.3
    before = weights_of(plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(float8).items())
    for one in (plain, float8):
        one.train_step([pack(samples[:4]), pack(samples[4:])], sequence_policy())
    moves = [torch.cat([(after[n] - before[n]).ravel() for n in before]) for after in map(weights_of, (plain, float8))]
    apart = (moves[1] - moves[0]).norm() / moves[0].norm()
    assert 0.01 < apart < 0.5


def test_padding_changes_no_log_prob(folders, start, pack, samples, monkeypatch):
    """Scales are of rows, so that a token's outputs are the same beside others."""
    backend = start(folders("qwen3"), FLOAT8)
    found = backend.forward_only([pack(samples)])[0].log_probs
    monkeypatch.setattr("slime_fsdp.stream_padding.MULTIPLE", 1)
    np.testing.assert_allclose(found, backend.forward_only([pack(samples)])[0].log_probs, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_streams_are_filled_with_one_sequence(shared, pack, samples):
    micro = pack([samples[0], samples[0], samples[1]])
    table = whole_sequences(micro.cu_seqlens)
    if shared:
        micro, table = share_prompts(micro)
    wide, wider = padded(micro, table)
    count = len(micro.tokens)
    assert len(wide.tokens) == 16 * math.ceil(count / 16) > count
    assert torch.equal(wide.tokens[:count], micro.tokens)
    assert wide.position_ids[count:].tolist() == list(range(len(wide.tokens) - count))
    assert wide.cu_seqlens.tolist() == [*micro.cu_seqlens.tolist(), len(wide.tokens)]
    assert wider.query_lengths.sum() == len(wide.tokens)
    assert wider.query_starts[-1] == count
    assert (wider.key_rows is None) == (not shared)
    assert not shared or wider.key_rows[-(len(wide.tokens) - count) :].tolist() == list(range(count, len(wide.tokens)))
    assert padded(wide, wider) == (wide, wider)


@pytest.mark.bits
def test_a_resumed_run_has_the_same_bits(folders, start, weights_of, train, tmp_path):
    straight = start(folders("llama"), FLOAT8)
    train(straight, 2)
    straight.save(tmp_path)
    train(straight, 2, first=2)
    resumed = start(folders("llama"), FLOAT8)
    resumed.load(tmp_path)
    train(resumed, 2, first=2)
    expected = weights_of(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())


@pytest.mark.parametrize(
    ("options", "model", "named"),
    [
        ({"precision": "float32"}, {}, "bfloat16"),
        ({"lora_rank": 2}, {}, "adapters"),
        ({"context_parallel_size": 2}, {}, "context_parallel_size"),
        ({}, {"model_type": "qwen3_moe", "num_experts": 4}, "experts"),
        ({}, {"model_type": "qwen3_next"}, "dense decoder"),
        ({}, {"model_type": "qwen3_vl"}, "dense decoder"),
    ],
)
def test_what_is_refused(options, model, named):
    problems = Fsdp.problems(FsdpConfig(**FLOAT8, **options), 2, {"model_type": "qwen3"} | model)
    assert any(problem.startswith("backend.fp8_recipe = ") and named in problem for problem in problems)
    assert not Fsdp.problems(FsdpConfig(**FLOAT8), 1, {"model_type": "qwen3"})
    assert any("fp8" in problem for problem in Fsdp.true_on_policy_problems(FsdpConfig(**FLOAT8)))


def test_sizes_that_do_not_divide_are_refused(use_float8):
    layer = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(32, 40)})
    with pytest.raises(ModelError, match="up_proj of a layer has 32 inputs and 40 outputs"):
        use_float8([layer], "rowwise", emulate=True)
