"""Parameters that are float32 in a bfloat16 folder."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)

from slime_fsdp.config import FsdpConfig
from slime_fsdp.folder import open_folder
from slime_fsdp.plugin import Fsdp
from slime_training.memory_plan import TrainerLoad

WIDE = {
    "qwen3": ("model.norm.weight", "model.layers.1.self_attn.q_norm.weight"),
    "qwen3_moe": ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
    "glm4_moe": ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"),
    "ernie4_5_moe": ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.moe_statics.e_score_correction_bias"),
}
"""Names in files."""
HALF = {"precision": "bfloat16"}
ADAPTERS = {"lora_rank": 2, "target_modules": ["q_proj", "v_proj"]}


SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


def make_ernie(folder):
    """The biases of its routers are parameters."""
    torch.manual_seed(3)
    config = Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_layer_start_index=1)
    Ernie4_5_MoeForCausalLM(config).save_pretrained(folder)
    return folder


def make_glm(folder):
    """The biases of its routers are buffers."""
    torch.manual_seed(3)
    config = Glm4MoeConfig(**SIZES, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=sorted(WIDE))
def mixed(request, folders, tmp_path):
    """A folder, its tensors, and the names of those in float32, which bfloat16 would round."""
    made = {"ernie4_5_moe": make_ernie, "glm4_moe": make_glm}
    source = made[request.param](tmp_path / "source") if request.param in made else folders(request.param)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    wide = WIDE[request.param]
    for name in wide:
        weights[name] = 1.0 + torch.rand(weights[name].shape, generator=torch.Generator().manual_seed(9)) / 64
        assert not torch.equal(weights[name].bfloat16().float(), weights[name])
    folder = tmp_path / "mixed"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(source).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder, weights, wide


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("options", [{}, HALF, HALF | ADAPTERS], ids=["float32", "bfloat16", "adapters"])
def test_they_are_saved_and_sent_as_the_folder_has_them(options, mixed, start, weights_of, tmp_path):
    folder, weights, _ = mixed
    backend = start(folder, options)
    backend.save_hf(tmp_path / "saved")
    same(load_file(tmp_path / "saved" / "model.safetensors"), weights)
    computed = torch.bfloat16 if options else torch.float32
    same(weights_of(backend), {name: t if t.dtype == torch.float32 else t.to(computed) for name, t in weights.items()})
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_what_is_trained_of_them_is_saved_in_float32(
    mixed, start, pack, samples, weights_of, sequence_policy, tmp_path
):
    folder, weights, wide = mixed
    backend = start(folder, HALF)
    backend.train_step([pack(samples)], sequence_policy())
    backend.save_hf(tmp_path / "saved")
    saved, sent = load_file(tmp_path / "saved" / "model.safetensors"), weights_of(backend)
    same(sent, saved)
    moved = [name for name in wide if not torch.equal(saved[name], weights[name])]
    assert moved == [name for name in wide if "bias" not in name]
    assert all(not torch.equal(saved[name].bfloat16().float(), saved[name]) for name in wide)


def test_frozen_ones_are_kept_beside_weights_in_bfloat16(mixed, start, weights_of):
    """In a copy, and in a trained model whose weights are kept in bfloat16."""
    folder, weights, wide = mixed
    backend = start(
        folder,
        HALF | {"main_params_dtype": "bf16", "only_train_params_name_list": ["embed_tokens"]},
        frozen_models={"reference": folder},
    )
    same(weights_of(backend), weights)
    kept = [tensor.dtype for tensor in backend._trainer.frozen_models["reference"].model.state_dict().values()]
    assert kept.count(torch.float32) == len(wide)


def test_a_plan_counts_them(mixed, start):
    """Counts them in the dtype in which they are held: of a trained model with only its embedding trained, and of a copy."""
    folder, _, _ = mixed
    options = HALF | {"main_params_dtype": "bf16", "only_train_params_name_list": ["embed_tokens"]}
    backend = start(folder, options, frozen_models={"reference": folder})
    trainer = backend._trainer
    load = TrainerLoad(setup=trainer.setup, tokens=64, scored_tokens=64, num_micro_batches=1)
    estimated = {line.component: line.num_bytes for line in Fsdp.memory(FsdpConfig(**options), load).lines}
    for line, model in {"weights": trainer.model, "copy: reference": trainer.frozen_models["reference"]}.items():
        assert estimated[line] == sum(parameter.nbytes for parameter in model.parameters()), line


def test_biases_of_routers_that_are_parameters_are_not_trained(start, pack, samples, sequence_policy, tmp_path):
    """They are not rounded with the trained weights either."""
    backend = start(make_ernie(tmp_path / "ernie"), HALF | {"main_params_dtype": "bf16"})
    assert not backend.train_step([pack(samples)], sequence_policy()).skipped
    frozen = {name for name, p in backend._trainer.model.model.named_parameters() if not p.requires_grad}
    assert frozen == {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"}


def test_a_folder_that_is_all_in_float32_has_none_though_its_config_has_bfloat16(folders, tmp_path):
    source = folders("qwen3")
    save_file(load_file(source / "model.safetensors"), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert open_folder(tmp_path).wide == frozenset()
