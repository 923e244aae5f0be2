"""slime-megatron's grouped experts on one GPU, in bfloat16, against Megatron's experts one after the other and float64.

Needs megatron-core and slime-megatron: `pytest tests/gpu/test_grouped_experts.py`. Prints how fast a layer is either way.
"""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.contracts.optimizer import OptimizerConfig
from slime_plugin_kit.tiny_training import SGD, SPLITS, Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
HIDDEN, FEATURES = 256, 128
COUNTS = {
    "16 experts, uneven": [1, 300, 17, 0, 129, 5, 64, 0, 2, 33, 250, 8, 77, 3, 111, 0],
    "16 experts, all to one": [0] * 5 + [700] + [0] * 10,
    "16 experts, none to the first": [0, *[13 * number for number in range(1, 16)]],
    "64 experts, one in three has none": [(37 * number) % 101 if number % 3 else 0 for number in range(64)],
    "64 experts, few rows": [number % 2 for number in range(64)],
}
LAYERS = {
    "16 experts, 4 of them a token": {"experts": 16, "top_k": 4, "hidden": 1024, "features": 768},
    "64 experts, 8 of them a token": {"experts": 64, "top_k": 8, "hidden": 2048, "features": 768},
}
TOKENS = 16384
ADAM = OptimizerConfig(lr=0.01, clip_grad=0.5, adam_eps=1e-2)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    from slime_megatron.compiler import no_compiler

    with no_compiler():
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from slime_megatron.transformer_engine import patch_missing_transformer_engine

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    patch_missing_transformer_engine()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make_layer(*, experts, grouped, here=True, top_k=2, hidden=HIDDEN, features=FEATURES, **more):
    """Router, dispatcher and experts, with random weights. `here`: tokens are not dispatched by Megatron."""
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime_megatron.layers import PackedLayers
    from slime_megatron.token_permutation import order_tokens_here

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=features,
        moe_ffn_hidden_size=features,
        num_attention_heads=4,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
        **more,
    )
    provider = PackedLayers(SimpleNamespace(sandwich_norms=False, interleaved_indexer=False))
    spec = get_mlp_module_spec_for_backend(provider, num_experts=experts, moe_grouped_gemm=grouped)
    layer = build_module(spec, config=config).to(DEVICE)
    if here:
        order_tokens_here(layer, config)
    generator = torch.Generator(DEVICE).manual_seed(1)
    with torch.no_grad():
        layer.router.weight.normal_(0, 0.1, generator=generator)
        fc1 = torch.randn(experts, 2 * features, hidden, generator=generator, device=DEVICE) * hidden**-0.5
        fc2 = torch.randn(experts, hidden, features, generator=generator, device=DEVICE) * features**-0.5
        if grouped:
            layer.experts.linear_fc1.weight.copy_(fc1)
            layer.experts.linear_fc2.weight.copy_(fc2)
        else:
            for number, expert in enumerate(layer.experts.local_experts):
                expert.linear_fc1.weight.copy_(fc1[number])
                expert.linear_fc2.weight.copy_(fc2[number])
    return layer


def weight_gradients(experts):
    if hasattr(experts, "linear_fc1"):
        return [experts.linear_fc1.weight.grad, experts.linear_fc2.weight.grad]
    return [
        torch.stack([getattr(expert, name).weight.grad for expert in experts.local_experts])
        for name in ("linear_fc1", "linear_fc2")
    ]


def spoil_memory():
    """Fills freed memory with NaN, so that elements that are not written show."""
    spoilt = [torch.full((2**28,), torch.nan, device=DEVICE) for _ in range(2)]
    small = [torch.full((2**size,), torch.nan, device=DEVICE) for size in range(4, 20) for _ in range(8)]
    del spoilt, small


def apart(found, reference):
    return float((found.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_are_those_of_float64(counts):
    from slime_megatron.grouped_products import GroupedProduct, Groups, in_one_kernel

    torch.manual_seed(0)
    rows = torch.randn(sum(counts), HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(len(counts), FEATURES, HIDDEN, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(sum(counts), FEATURES, device=DEVICE, dtype=torch.bfloat16)
    assert in_one_kernel(rows, weight.mT)
    for where in ("cpu", "cuda"):
        groups = Groups.of(torch.tensor(counts, device=where), DEVICE)
        spoil_memory()
        found = GroupedProduct.apply(rows, weight, groups)
        given = torch.autograd.grad(found, (rows, weight), grad)

        wide, matrices = rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        parts = zip(wide.split(counts), matrices, strict=True)
        reference = torch.cat([part @ matrix.t() for part, matrix in parts])
        exact = torch.autograd.grad(reference, (wide, matrices), grad.double())
        for one, other in zip((found, *given), (reference, *exact), strict=True):
            assert one.shape == other.shape
            assert apart(one, other) < 5e-3
        assert not given[1][torch.tensor(counts) == 0].any()


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("recomputed", [False, True])
def test_experts_are_those_of_megatron_and_float64(counts, recomputed):
    torch.manual_seed(0)
    drawn = torch.randn(sum(counts), HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.rand(sum(counts), device=DEVICE)
    grad = torch.randn(sum(counts), HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    found = {}
    for grouped in (True, False):
        more = (
            {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]} if recomputed and grouped else {}
        )
        experts = make_layer(experts=len(counts), grouped=grouped, **more).experts
        hidden, probs = drawn.clone().requires_grad_(), weights.clone().requires_grad_()
        spoil_memory()
        out, _ = experts(hidden, torch.tensor(counts), probs)
        out.backward(grad)
        found[grouped] = [out.detach(), hidden.grad, probs.grad, *weight_gradients(experts)]
        if grouped:
            exact = [experts.linear_fc1.weight.detach().double(), experts.linear_fc2.weight.detach().double()]

    wide = [x.detach().double().requires_grad_() for x in (drawn, weights, *exact)]
    parts = []
    for rows, probs, fc1, fc2 in zip(wide[0].split(counts), wide[1].split(counts), wide[2], wide[3], strict=True):
        gate, up = (rows @ fc1.t()).chunk(2, -1)
        parts.append((torch.nn.functional.silu(gate) * up * probs[:, None]) @ fc2.t())
    reference = torch.cat(parts)
    reference = [reference.detach(), *torch.autograd.grad(reference, wide, grad.double())]
    for grouped, loop, other in zip(found[True], found[False], reference, strict=True):
        assert apart(grouped, other) < max(5e-3, 1.2 * apart(loop, other))


def test_a_model_trains_like_with_megatrons_experts(tmp_path):
    """It is offloaded and onloaded between two steps."""
    from slime_megatron.plugin import Megatron

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=25,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=640,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    training = TrainingBatch.make()
    scores, weights = {}, {}
    for grouped in (True, False):
        for distributed in (True, False):
            options = {"moe_grouped_gemm": grouped, "use_distributed_optimizer": distributed}
            backend = Megatron.build(Megatron.Config(**options))
            setup = {"optimizer": ADAM if distributed else SGD}
            with opened(backend, Place(model=tmp_path), device="cuda", **setup) as one:
                before = one.weights()
                scores[grouped] = one.scores(training)["log_probs"]
                assert not one.backend.train_step(training.micros(SPLITS[0]), objective_of()).skipped
                after = one.weights()
                one.backend.sleep()
                one.backend.wake_up()
                awake = one.weights()
                assert all(torch.equal(awake[name], tensor) for name, tensor in after.items())
                assert not one.backend.train_step(training.micros(SPLITS[0]), objective_of()).skipped
            weights[grouped, distributed] = torch.cat(
                [(after[name] - before[name]).float().flatten() for name in before]
            )
    assert np.median(np.abs(scores[True] - scores[False])) < 0.02
    for distributed in (True, False):
        moved = weights[False, distributed]
        assert float((weights[True, distributed] - moved).norm() / moved.norm()) < 0.2


KINDS = {
    "loop": {"grouped": False},
    "grouped": {"grouped": True, "here": False},
    "grouped, tokens ordered here": {"grouped": True},
}


@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_layers_are_those_of_megatron(sizes):
    """Compares outputs and gradients, of the tokens and of the router's weights."""
    torch.manual_seed(0)
    for tokens in (1, 777, 300):
        drawn = torch.randn(tokens, 1, sizes["hidden"], device=DEVICE, dtype=torch.bfloat16)
        found = {}
        for name, kind in KINDS.items():
            layer = make_layer(**kind, **sizes)
            hidden = drawn.clone().requires_grad_()
            spoil_memory()
            out, _ = layer(hidden)
            out.backward(drawn)
            found[name] = [out.detach(), hidden.grad, layer.router.weight.grad, *weight_gradients(layer.experts)]
        loop = found.pop("loop")
        for name, tensors in found.items():
            for one, other in zip(tensors, loop, strict=True):
                assert apart(one, other.double()) < 5e-2, name


@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_how_fast_a_layer_is(sizes, capsys):
    """Prints the times and checks nothing."""
    torch.manual_seed(0)
    drawn = torch.randn(TOKENS, 1, sizes["hidden"], device=DEVICE, dtype=torch.bfloat16)
    for name, kind in KINDS.items():
        layer = make_layer(**kind, **sizes)
        host = both = 0.0
        for turn in range(6):
            hidden = drawn.clone().requires_grad_()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(4):
                out, _ = layer(hidden)
                out.backward(drawn)
            issued = time.perf_counter()
            torch.cuda.synchronize()
            if turn > 1:
                host += issued - begin
                both += time.perf_counter() - begin
        with capsys.disabled():
            print(
                f"\n{sizes['experts']} experts, {TOKENS} tokens, forward and backward of a layer, {name}: "
                f"{16 * TOKENS / both:,.0f} tokens/s, {both / 16 * 1e3:.2f} ms, issued in {host / 16 * 1e3:.2f} ms"
            )
        del layer
