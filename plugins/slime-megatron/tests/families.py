"""Tiny random models of each family, made by transformers, and the reference results of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
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


def make_family(folder: Path, name: str, *, seed: int = 11) -> Path:
    """Weights far from zero, so that a wrong norm, gate or position shows."""
    model_type, sizes = FAMILIES[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **sizes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * 0.2 if tensor.ndim > 1 else tensor + 0.1 * noise)
    model.save_pretrained(folder)
    return folder


def load_family(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()
