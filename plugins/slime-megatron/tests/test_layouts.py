"""Every layout trains like one rank: log-probs, gradients (weights after a step of plain descent), norms and metrics."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.megatron

SHARD_BYTES = 2**14
FLOAT32 = 2e-5
"""Tolerance for sums in another order, relative to the largest number; for log-probs in nats."""

TP2 = {"tensor_model_parallel_size": 2}
SP2 = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
LAST1 = {**PP2, "num_layers_in_last_pipeline_stage": 1}
OUTER_STAGE = {**PP2, "pipeline_model_parallel_layout": "E|ttttL"}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
FULLY_AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DENSE = {
    "dp2": (2, {}),
    "tp2-sp": (2, SP2),
    "pp2-last1": (2, LAST1),
    "pp2-vpp2": (2, VPP2),
    "cp2": (2, CP2),
    "dp2-cp2": (4, CP2),
    "tp2-sp-cp2": (4, {**SP2, **CP2}),
    "tp2-sp-pp2-outer": (4, {**SP2, **OUTER_STAGE}),
    "pp2-cp2": (4, {**PP2, **CP2}),
    "recomputed": (1, FULLY_AGAIN),
    "tp2, chunked": (2, {**TP2, "log_probs_chunk_size": 7}),
}
EXPERTS = {
    "dp2-ep2": (2, EP2),
    "tp2-sp": (2, SP2),
    "tp2-sp-ep2": (2, {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    "pp2": (2, PP2),
    "cp2, experts one after the other": (2, {**CP2, "moe_grouped_gemm": False}),
    "cp2-ep2": (2, {**CP2, **EP2}),
    "dp2-tp2-sp-ep2": (4, {**SP2, **EP2}),
    "dp2-pp2-ep2": (4, {**PP2, **EP2}),
}
LATENT = {
    "tp2-sp": (2, SP2),
    "pp2": (2, PP2),
    "cp2": (2, CP2),
    "dp2-ep2": (2, EP2),
}
# Layouts that recompute experts in the backward.
EXPERTS_AGAIN = {**LATENT, "pp2": (2, {**PP2, "recompute_granularity": "selective", "recompute_modules": ["moe"]})}
# The other layouts are DeepSeek's.
SILU_AGAIN = {
    "tp2-sp": (2, SP2),
    "pp2": (2, {**PP2, "recompute_granularity": "selective", "recompute_modules": ["moe_act"]}),
}
# Two tensor-parallel ranks share its one key-value head, context-parallel ones the heads of its delta nets too.
LINEAR = {"tp2-sp": (2, SP2), "cp2": (2, CP2), "tp2-sp-cp2": (4, {**SP2, **CP2})}
DENSE_LINEAR = {"tp2": (2, TP2), "pp2": (2, PP2)}
EXPERTS_LINEAR = {"tp2-sp-ep2": EXPERTS["tp2-sp-ep2"], "pp2": (2, PP2)}
# Ranks share the heads that its norms are over; of four, two have the same key-value head.
JOINT_NORMS = {**EXPERTS_LINEAR, "tp4-sp": (4, {**SP2, "tensor_model_parallel_size": 4})}
# Its last layer uses the choice of the one before it.
CHOSEN = {**LATENT, "recomputed": DENSE["recomputed"]}
SANDWICH = {"tp2-sp": (2, SP2), "pp2": (2, PP2), "cp2": (2, CP2)}
# Auxiliary losses of experts are not linear over micro-batches: they agree where ranks share the same ones.
BALANCED = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.02,
}
# That of each sequence is linear: it agrees however ranks divide them.
BY_SEQUENCE = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
SEQUENCES = {
    "tp2-sp": (2, SP2),
    "cp2-ep2": (2, {**CP2, **EP2}),
    "dp2-pp2-ep2, recomputed": (4, {**PP2, **EP2, **FULLY_AGAIN}),
    "tp2-sp-cp2": (4, {**SP2, **CP2}),
}
SHARED = {"tp2-sp": (2, SP2), "pp2": (2, PP2), "cp2": (2, CP2), "tp2-sp-cp2": (4, {**SP2, **CP2})}
ALWAYS = {
    "qwen3-moe, balanced": ("qwen3-moe", BALANCED),
    "qwen3-moe, sequences balanced": ("qwen3-moe", BY_SEQUENCE),
}
MODELS = {
    "qwen3-moe, balanced": SHARED,
    "qwen3-moe, sequences balanced": SEQUENCES,
    "qwen3": DENSE,
    # What is its own, the frequencies of its positions, depends on the layout where ranks have parts of a sequence.
    "llama3": {"cp2": (2, CP2)},
    "qwen2.5-tied": SANDWICH,
    "qwen3-moe": EXPERTS,
    "deepseek-v3": LATENT,
    "qwen3-next": LINEAR,
    "qwen3.5": DENSE_LINEAR,
    "qwen3.5-moe": EXPERTS_LINEAR,
    "minimax-m2": JOINT_NORMS,
    "glm-5": CHOSEN,
    "glm-4": SANDWICH,
    "glm-4.5": EXPERTS_AGAIN,
    "glm-4.7-flash": SILU_AGAIN,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs a model's layouts when the first of them is requested."""
    from families import make_family

    from conftest import run_layouts

    done = {}

    def of(family):
        if family not in done:
            model, always = ALWAYS.get(family, (family, {}))
            folder = make_family(tmp_path_factory.mktemp("model") / model, model)
            layouts = {"one": (1, {}), **MODELS[family]}
            cases = {
                name: {
                    "model": str(folder),
                    "world_size": count,
                    "options": {**always, **options},
                    "shard_bytes": SHARD_BYTES,
                }
                for name, (count, options) in layouts.items()
            }
            done[family] = run_layouts(tmp_path_factory.mktemp("layouts"), cases)
        return done[family]

    return of


@pytest.mark.parametrize(("family", "layout"), [(family, name) for family, names in MODELS.items() for name in names])
def test_it_trains_like_one_rank(made, family, layout):
    (one,), ranks = made(family).ranks("one"), made(family).ranks(layout)
    assert_close("log-probs", joined(ranks, "log_probs"), one["scores"]["log_probs"], FLOAT32)
    assert_close("entropies", joined(ranks, "entropy"), one["scores"]["entropy"], FLOAT32)

    first, *others = ranks
    assert list(first["before"]) == list(one["before"])
    for name, tensor in one["before"].items():
        assert torch.equal(first["before"][name], tensor), f"{name} was loaded or exported wrongly"
    assert not any(rank["before"] or rank["after"] for rank in others), "another rank than the first exports weights"

    expected = gradients(one)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert scale > 1e-2
    for name, gradient in gradients(first).items():
        apart = float((gradient - expected[name]).abs().max())
        assert apart <= FLOAT32 * scale, (
            f"the gradient of {name} is off by {apart:.3g}, where the largest is {scale:.3g}"
        )

    for rank in ranks:
        assert rank["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    sums = {}
    for rank in ranks:
        for name, value in rank["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
    assert sums == pytest.approx(one["sums"], rel=1e-5, abs=1e-6)


def test_nothing_is_compiled_on_a_cpu(made):
    """Each rank would start with it for as long as a layout takes here."""
    (one,) = made("qwen3").ranks("one")
    assert one["compiled"] == [] or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3", "tp2-sp-cp2"), ("qwen3-moe", "dp2-pp2-ep2"), ("deepseek-v3", "pp2")]
)
def test_ranks_write_a_model_together(made, family, layout):
    layouts = made(family)
    first, *_ = layouts.ranks(layout)
    folder = layouts.out / layout / "hf"
    shards = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(shards) > 4
    saved = {}
    for shard in shards:
        saved |= load_file(shard)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == saved.keys()
    extra = saved.keys() - first["after"].keys()
    assert not extra
    for name, tensor in first["after"].items():
        assert torch.equal(saved[name], tensor), name


def joined(ranks, name):
    column = torch.full_like(ranks[0]["scores"][name], torch.nan)
    for rank in ranks:
        if rank["layout"]["reports"]:
            held = ~rank["scores"][name].isnan()
            column[held] = rank["scores"][name][held]
    return column


def gradients(rank):
    return {name: tensor - rank["after"][name] for name, tensor in rank["before"].items()}


def assert_close(what, got, expected, tolerance):
    apart = float((got - expected).abs().max())
    assert apart <= tolerance, f"{what} are off by {apart:.3g} (NaN: no rank held the token)"
