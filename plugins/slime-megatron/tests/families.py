"""Tiny random models of each family, made by transformers, and the reference results of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from slime_plugin_kit.tiny_training import TrainingBatch

VOCABULARY: Final = 25
"""Odd: two ranks share it with a row of padding."""
COMMON: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
EXPERTS: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Final = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **EXPERTS,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
# Fewer keys than most sequences have; enough heads to make ties of zero scores rare.
INDEXER: Final = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 8}
LINEAR: Final = {
    # Of a sequence's first tokens some outputs are close to zero, and rounding grows in the norm that divides by them.
    "rms_norm_eps": 1e-2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
EXPERTS_OF_QWEN35: Final = {
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
TOWER: Final = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": COMMON["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
WITH_TOWER: Final = ("qwen3_5", "qwen3_5_moe")
STACKED: Final = ("qwen3.5-moe",)
FAMILIES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2.5": ("qwen2", {}),
    "qwen2.5-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
    "qwen3-moe-plain-gates": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "head_dim": 16,
            "num_key_value_heads": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            **LINEAR,
        },
    ),
    # A decoder alone, and, as released, with a vision tower.
    "qwen3.5": ("qwen3_5", {"head_dim": 16, **LINEAR, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe", {"head_dim": 16, **LINEAR, **EXPERTS_OF_QWEN35}),
    "qwen3.5-moe-text": ("qwen3_5_moe_text", {"head_dim": 16, **LINEAR, **EXPERTS_OF_QWEN35}),
    "minimax-m2": (
        "minimax_m2",
        {
            "head_dim": 16,
            "intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm-4": ("glm4", {"head_dim": 16, "attention_bias": True}),
    "glm-4.5": ("glm4_moe", {"head_dim": 16, **EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "glm-4.5-air": ("glm4_moe", {"head_dim": 16, **EXPERTS, "use_qk_norm": False}),
    "deepseek-v3": ("deepseek_v3", {**LATENT, "q_lora_rank": 24}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-v3.2": ("deepseek_v32", {**LATENT, "q_lora_rank": 24, "num_experts": 8, **INDEXER}),
    "glm-5": (
        "glm_moe_dsa",
        {
            **LATENT,
            **EXPERTS,
            "q_lora_rank": 24,
            "head_dim": 8,
            **INDEXER,
            "indexer_types": ["full", "full", "full", "shared"],
            # transformers 5.12 computes it so, whatever the config has.
            "indexer_rope_interleave": False,
        },
    ),
    "moonlight": ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {
            **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
            "q_lora_rank": 24,
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            # The epsilon of transformers in the norms of latent queries and keys, while engines use the config's.
            "rms_norm_eps": 1e-6,
        },
    ),
}


def make_family(folder: Path, name: str, *, seed: int = 11, stacked: bool = True) -> Path:
    """Weights far from zero, so that a wrong norm, gate or position shows. `stacked`: experts are in the released form."""
    model_type, sizes = FAMILIES[name]
    fields = {**COMMON, **sizes}
    torch.manual_seed(7)
    if model_type in WITH_TOWER:
        tied = fields.pop("tie_word_embeddings")
        config = AutoConfig.for_model(model_type, text_config=fields, vision_config=TOWER, tie_word_embeddings=tied)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                # The keys of delta nets are divided by their length: rounding grows where it is close to zero.
                width = 1.0 if "conv1d" in key else 0.2
                tensor.copy_(noise * width if tensor.ndim > 1 else tensor + 0.1 * noise)
    model.save_pretrained(folder)
    if stacked and name in STACKED:
        stack_experts(folder / "model.safetensors")
    return folder


def stack_experts(file: Path) -> None:
    """Joins the experts of each layer of the decoder to two tensors, as in released folders."""
    weights = load_file(file)
    layers: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name in list(weights):
        if found := re.match(r"(model\..*\.experts)\.(\d+)\.(\w+)\.weight$", name):
            layers.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = weights.pop(name)
    for layer, experts in layers.items():
        of = [experts[number] for number in range(len(experts))]
        weights[f"{layer}.gate_up_proj"] = torch.stack([torch.cat([one["gate_proj"], one["up_proj"]]) for one in of])
        weights[f"{layer}.down_proj"] = torch.stack([one["down_proj"] for one in of])
    save_file(weights, file, metadata={"format": "pt"})


def load_family(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    loader = AutoModelForImageTextToText if kind in WITH_TOWER else AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")
    return model.eval()


def gradients_of(training: TrainingBatch, model: Any, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Gradients by transformers, of the tensors of a folder that has these names."""
    found = training.gradients_by_transformers(model)
    given = {name: gradient for name, gradient in found.items() if gradient is not None}
    both = {**given, **revert_weight_conversion(model, given)}
    return {name: both[name] for name in names if name in both}
