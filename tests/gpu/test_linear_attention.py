"""On one GPU: gated delta nets by the kernel of flash-linear-attention and in chunks, and models with states or chosen keys,
close to the results of the CPU in float32."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_training import SPLITS, Place, TrainingBatch, objective_of, opened
from slime_training.delta_rule import gated_delta_rule, in_chunks, plan_recurrence

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = (1, 300, 64, 7, 129, 65)
SIZES = {
    "vocab_size": 25,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek_v32": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "index_topk": 6,
        "index_head_dim": 32,
        "index_n_heads": 8,
    },
}


def inputs(dtype, device, seed=0, keys=2, values=4, width=64, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(sum(lengths), *shape, generator=generator)

    exact = [
        *(random(heads, width) for heads in (keys, keys, values)),
        -random(values).abs(),
        random(values).sigmoid(),
    ]
    made = [x.to(device, dtype) for x in exact]
    made[3] = exact[3].to(device)
    return [x.requires_grad_() for x in made]


def test_the_kernel_computes_the_same_as_chunks():
    """If fla is installed but refuses its backward (see `fused_kernel`), the fallback trains."""
    assert find_spec("fla") is not None, "pip install flash-linear-attention"
    cuda = torch.device("cuda")
    given = inputs(torch.bfloat16, cuda)
    plan = plan_recurrence(np.array(LENGTHS), cuda)
    q, k, v, decay, strength = given
    repeated = [x.repeat_interleave(2, dim=1) for x in (q, k)]
    found = [
        [out, *torch.autograd.grad(out.float().square().sum(), given)]
        for out in (gated_delta_rule(*given, plan), in_chunks(*repeated, v, decay, strength, plan))
    ]
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() < 2e-2 * other.float().norm()


def test_chunks_on_the_gpu_are_those_of_the_cpu():
    found = []
    for name in ("cpu", "cuda"):
        given = inputs(torch.float32, name)
        out = gated_delta_rule(*given, plan_recurrence(np.array(LENGTHS), torch.device(name)))
        found.append([x.cpu() for x in (out, *torch.autograd.grad(out.square().sum(), given))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_models_are_near_transformers_in_float64(family, tmp_path, monkeypatch):
    # If fla is installed, transformers would call its kernels, also on a CPU.
    monkeypatch.setattr("transformers.utils.import_utils.is_flash_linear_attention_available", lambda: False)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    implementations = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **implementations).eval()
    training = TrainingBatch.make()
    with torch.no_grad():
        exact = training.by_transformers(model)[0].numpy()
    # In half precision sometimes another expert or key is chosen, and that token differs much.
    for bf16, tolerance in ((False, 1e-3), (True, 0.1)):
        backend = Megatron.build(Megatron.Config(use_distributed_optimizer=False, bf16=bf16))
        with opened(backend, Place(model=tmp_path), device=DEVICE) as one:
            apart = np.abs(one.scores(training, SPLITS[0])["log_probs"] - exact)
            report = one.backend.train_step(training.micros(SPLITS[0]), objective_of())
            moved = one.scores(training, SPLITS[0])["log_probs"]
        assert (np.median(apart) if bf16 else apart.max()) < tolerance
        assert not report.skipped
        assert np.abs(moved - exact).max() > 1e-2
