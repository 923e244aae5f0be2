"""Experts of a layer as two grouped products, and tokens permuted without Megatron's dispatcher: they compute the same as
Megatron's experts one after the other."""

import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from families import make_family

from slime_core.algorithm.loss import TokenObjective
from slime_core.errors import ConfigError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.objectives import EVERY_NEED
from slime_plugin_kit.tiny_training import SPLITS, Place, SquaredError, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

FLOAT32 = 1e-5
"""Tolerance relative to the largest number."""
HIDDEN, FEATURES, EXPERTS, TOP_K = 24, 12, 6, 2
COUNTS = {
    "uneven": [1, 9, 4, 17, 2, 3],
    "some without tokens": [0, 5, 0, 0, 8, 0],
    "all to one": [0, 0, 0, 21, 0, 0],
    "no tokens": [0] * 6,
}
LOOP = {"moe_grouped_gemm": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / "qwen3-moe", "qwen3-moe")


def opened_one(folder, options, **kwargs):
    return opened(Megatron.build(Megatron.Config(**options)), Place(model=folder), **kwargs)


@pytest.fixture
def one_rank(folder):
    """Creates Megatron's groups for one rank, or uses those of this process."""
    with opened_one(folder, {}):
        yield


def make_layer(*, grouped, here=True, **more):
    """Router, dispatcher and experts. `here`: tokens are not dispatched by Megatron."""
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_megatron.layers import PackedLayers
    from slime_megatron.token_permutation import order_tokens_here

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FEATURES,
        moe_ffn_hidden_size=FEATURES,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        **more,
    )
    provider = PackedLayers(SimpleNamespace(sandwich_norms=False, interleaved_indexer=False, joint_qk_norm=False))
    spec = get_mlp_module_spec_for_backend(provider, num_experts=EXPERTS, moe_grouped_gemm=grouped)
    layer = build_module(spec, config=config)
    if here:
        order_tokens_here(layer, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(layer.named_parameters()):
            if ".experts." not in f".{name}":
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        fc1 = torch.randn(EXPERTS, 2 * FEATURES, HIDDEN, generator=generator) * 0.3
        fc2 = torch.randn(EXPERTS, HIDDEN, FEATURES, generator=generator) * 0.3
        for stacked, name in ((fc1, "linear_fc1"), (fc2, "linear_fc2")):
            if grouped:
                getattr(layer.experts, name).weight.copy_(stacked)
            else:
                for expert, weight in zip(layer.experts.local_experts, stacked, strict=True):
                    getattr(expert, name).weight.copy_(weight)
    return layer


def by_expert(experts):
    """Weights and their gradients, stacked."""
    kinds = ("linear_fc1", "linear_fc2")
    if hasattr(experts, "local_experts"):
        weights = [[getattr(expert, kind).weight for expert in experts.local_experts] for kind in kinds]
        return [torch.stack(of) for of in weights] + [torch.stack([weight.grad for weight in of]) for of in weights]
    weights = [getattr(experts, kind).weight for kind in kinds]
    return weights + [weight.grad for weight in weights]


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().abs().max() if one.numel() else 0.0) <= FLOAT32 * max(
            1.0, float(other.detach().abs().max()) if other.numel() else 0.0
        )


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("again", [False, True], ids=["", "activation computed again"])
def test_experts_compute_the_same_as_megatrons(one_rank, counts, again):
    """Compares outputs, gradients and weights after a step of descent, also with torch in float64."""
    torch.manual_seed(0)
    more = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if again else {}
    drawn, weights = torch.randn(sum(counts), HIDDEN), torch.rand(sum(counts))
    found = {}
    for grouped in (True, False):
        experts = make_layer(grouped=grouped, **(more if grouped else {})).experts
        hidden, probs = drawn.clone().requires_grad_(), weights.clone().requires_grad_()
        exact = [x.detach().double().requires_grad_() for x in (drawn, weights, *by_expert_before(experts))]
        if grouped:
            activated = Mock(wraps=experts.activated)
            experts.activated = activated
        out, _ = experts(hidden, torch.tensor(counts), probs)
        out.square().sum().backward()
        torch.optim.SGD(experts.parameters(), lr=0.1).step()
        found[grouped] = [out, hidden.grad, probs.grad, *by_expert(experts)]
    assert_near(found[True], found[False])
    assert activated.call_count == 1 + again

    parts = []
    for rows, probs, fc1, fc2 in zip(exact[0].split(counts), exact[1].split(counts), exact[2], exact[3], strict=True):
        gate, up = (rows @ fc1.t()).chunk(2, -1)
        parts.append((torch.nn.functional.silu(gate) * up * probs[:, None]) @ fc2.t())
    expected = torch.cat(parts)
    gradients = torch.autograd.grad(expected.square().sum(), exact)
    stepped = [exact[2] - 0.1 * gradients[2], exact[3] - 0.1 * gradients[3]]
    assert_near(found[True], [expected, *gradients[:2], *stepped, *gradients[2:]])


def by_expert_before(experts):
    for parameter in experts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = by_expert(experts)[:2]
    experts.zero_grad()
    return found


@pytest.mark.parametrize("shared", [{}, {"moe_shared_expert_intermediate_size": 16}], ids=["", "with a shared expert"])
@pytest.mark.parametrize("one_expert", [False, True], ids=["", "all to the same two"])
def test_tokens_are_ordered_as_by_megatron(one_rank, shared, one_expert):
    torch.manual_seed(0)
    drawn = torch.randn(13, 1, HIDDEN)
    found = []
    overlapped = {"moe_shared_expert_overlap": True} if shared else {}
    for kind in (
        {"grouped": False},
        {"grouped": True, "here": False},
        {"grouped": True},
        {"grouped": True, **overlapped},
    ):
        layer = make_layer(**kind, **shared)
        if one_expert:
            with torch.no_grad():
                layer.router.weight[2:].zero_()
                layer.router.weight[:2].fill_(1.0)
        hidden = (drawn.abs() if one_expert else drawn).clone().requires_grad_()
        out, _ = layer(hidden)
        out.square().sum().backward()
        found.append([out, hidden.grad, layer.router.weight.grad, *by_expert(layer.experts)])
        if shared:
            found[-1].append(layer.shared_experts.linear_fc1.weight.grad)
    for other in found[1:]:
        assert_near(other, found[0])


def test_a_token_sent_to_too_few_experts_is_an_error(one_rank):
    from slime_megatron.token_permutation import TokenOrder

    sent = torch.tensor([[True, False, True], [False, True, False]])
    with pytest.raises(RuntimeError, match="another number of experts than the router's"):
        TokenOrder.of(sent, 2)


@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bfloat16"])
def test_a_model_trains_either_way(folder, half):
    """With float32 sums of gradients and weights in the optimizer."""
    training = TrainingBatch.make()
    scores, moved = [], []
    for options in ({}, LOOP):
        with opened_one(folder, {**options, **half}) as one:
            scores.append(torch.from_numpy(one.scores(training)["log_probs"]))
            before = one.weights()
            one.backend.train_step(training.micros(SPLITS[0]), objective_of())
            after = one.weights()
            moved.append(torch.cat([(before[name] - after[name]).float().flatten() for name in before]))
    assert float((scores[0] - scores[1]).abs().median()) < (2e-2 if half else FLOAT32)
    assert moved[1].any()
    assert float((moved[0] - moved[1]).norm()) <= (5e-2 if half else FLOAT32) * float(moved[1].norm())


def test_copies_are_scored_with_their_own_experts(folder, tmp_path):
    other, training = make_family(tmp_path / "other", "qwen3-moe", seed=5), TrainingBatch.make()
    with opened_one(other, LOOP) as one:
        expected = one.scores(training)["log_probs"]
    with opened_one(folder, {}, frozen_models={"teacher": other}) as one:
        before = one.weights()
        got = one.scores(training, weights="teacher")["log_probs"]
        assert abs(got - expected).max() <= FLOAT32
        assert all(torch.equal(before[name], tensor) for name, tensor in one.weights().items())


def test_a_critic_has_them(folder):
    training = TrainingBatch.make()
    objective = TokenObjective(loss=SquaredError(), needs=EVERY_NEED, reads_values=True)
    after = []
    for options in ({}, LOOP):
        with opened_one(folder, options, head="value") as one:
            one.backend.train_step(training.micros(), objective)
            after.append(one.weights())
    assert_near(after[0].values(), after[1].values())


def trained_parts(folder, options):
    """Numbers and kinds of weights of experts that a step has changed in any layer. Some experts get no tokens."""
    training = TrainingBatch.make()
    with opened_one(folder, options) as one:
        before = one.weights()
        one.backend.train_step(training.micros(), objective_of())
        after = one.weights()
    names = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    return {found.groups() for name in names if (found := re.search(r"\.experts\.(\d+)\.(\w+)_proj", name))}


@pytest.mark.parametrize("options", [{}, LOOP], ids=["grouped", "one after the other"])
def test_they_are_frozen_by_megatrons_names(folder, options):
    frozen = {"freeze_params_name_list": (r"\.experts\.local_experts\.\d+\.linear_fc1\.weight$",)}
    everything = trained_parts(folder, options)
    assert len(everything) == 3 * 8
    assert trained_parts(folder, {**options, **frozen}) == {part for part in everything if part[1] == "down"}


def test_freezing_some_experts_requires_them_apart(folder):
    some = {"freeze_params_name_list": (r"local_experts\.3\.",)}
    with pytest.raises(ConfigError, match=r"select some experts of .*Set backend\.moe_grouped_gemm = false"):
        opened_one(folder, some).__enter__()
    assert {number for number, _ in trained_parts(folder, {**some, **LOOP})} == set("0124567")


def test_experts_with_biases_are_refused(folder):
    from slime_megatron.folder import open_folder
    from slime_megatron.layout import ParallelDims
    from slime_megatron.model_chunks import Placement, make_config

    architecture = open_folder(folder).bridge.architecture()
    biased = replace(architecture, options={**architecture.options, "add_bias_linear": True})
    place = Placement(device=torch.device("cpu"), dtype=torch.float32)
    assert make_config(architecture, Megatron.Config(), ParallelDims(), place).moe_grouped_gemm
    assert not make_config(biased, Megatron.Config(), ParallelDims(), place).moe_grouped_gemm
    with pytest.raises(ConfigError, match=r"backend\.moe_grouped_gemm = true: experts of this family have biases"):
        make_config(biased, Megatron.Config(moe_grouped_gemm=True), ParallelDims(), place)
