"""Shapes of public models: the keys of their config.json, without weights. For memory plans, benchmarks and random models.

Rotary scaling, special tokens and what else changes no shape are left to the model's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slime_core.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    architecture: str
    """`model_type` of transformers. Of a model whose own type is code in its folder, the one that it is: its
    weights load as that, and random ones can be made of it."""
    billions: float
    """Parameters, without layers of multi-token prediction."""
    fields: Mapping[str, Any]
    """Keys of config.json."""


Sizes = tuple[int, int, int, int, int]
"""Hidden features, MLP features, layers, attention heads, key-value heads."""


def preset(architecture: str, billions: float, sizes: Sizes, **more: Any) -> Preset:
    hidden, mlp, layers, heads, kv_heads = sizes
    fields = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": False,
        **more,
    }
    return Preset(architecture=architecture, billions=billions, fields=fields)


QWEN2_5: Final[Mapping[str, Any]] = {
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
SMALL_QWEN2_5: Final[Mapping[str, Any]] = {**QWEN2_5, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3: Final[Mapping[str, Any]] = {
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
}
TIED_QWEN3: Final[Mapping[str, Any]] = {**QWEN3, "tie_word_embeddings": True}
QWEN3_MOE: Final[Mapping[str, Any]] = {**QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
LLAMA: Final[Mapping[str, Any]] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
GLM4: Final[Mapping[str, Any]] = {
    "vocab_size": 151552,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
}
GLM4_MOE: Final[Mapping[str, Any]] = {
    **GLM4,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "attention_bias": True,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Final[Mapping[str, Any]] = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3: Final[Mapping[str, Any]] = {
    **LATENT,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 1e4,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
}
GLM4_355B: Final[Mapping[str, Any]] = {
    **GLM4_MOE,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
LONG_GLM4_355B: Final[Mapping[str, Any]] = {**GLM4_355B, "max_position_embeddings": 202752}

PRESETS: Final[Mapping[str, Preset]] = {
    "qwen2.5-0.5B": preset("qwen2", 0.494, (896, 4864, 24, 14, 2), **SMALL_QWEN2_5),
    "qwen2.5-1.5B": preset("qwen2", 1.54, (1536, 8960, 28, 12, 2), **SMALL_QWEN2_5),
    "qwen2.5-3B": preset("qwen2", 3.09, (2048, 11008, 36, 16, 2), **SMALL_QWEN2_5),
    "qwen2.5-7B": preset("qwen2", 7.62, (3584, 18944, 28, 28, 4), **QWEN2_5),
    "qwen2.5-14B": preset("qwen2", 14.8, (5120, 13824, 48, 40, 8), **QWEN2_5),
    "qwen2.5-32B": preset("qwen2", 32.8, (5120, 27648, 64, 40, 8), **QWEN2_5),
    "qwen2.5-72B": preset("qwen2", 72.7, (8192, 29568, 80, 64, 8), **QWEN2_5),
    "qwen3-0.6B": preset("qwen3", 0.596, (1024, 3072, 28, 16, 8), **TIED_QWEN3),
    "qwen3-1.7B": preset("qwen3", 1.72, (2048, 6144, 28, 16, 8), **TIED_QWEN3),
    "qwen3-4B": preset("qwen3", 4.02, (2560, 9728, 36, 32, 8), **TIED_QWEN3),
    "qwen3-8B": preset("qwen3", 8.19, (4096, 12288, 36, 32, 8), **QWEN3),
    "qwen3-14B": preset("qwen3", 14.8, (5120, 17408, 40, 40, 8), **QWEN3),
    "qwen3-32B": preset("qwen3", 32.8, (5120, 25600, 64, 64, 8), **QWEN3),
    "qwen3-30B-A3B": preset("qwen3_moe", 30.5, (2048, 6144, 48, 32, 4), moe_intermediate_size=768, **QWEN3_MOE),
    "qwen3-235B-A22B": preset("qwen3_moe", 235.1, (4096, 12288, 94, 64, 4), moe_intermediate_size=1536, **QWEN3_MOE),
    "qwen3-next-80B-A3B": preset(
        "qwen3_next",
        79.7,
        (2048, 5120, 48, 16, 2),
        vocab_size=151936,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        head_dim=256,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "llama3.2-1B": preset("llama", 1.24, (2048, 8192, 16, 32, 8), **{**LLAMA, "tie_word_embeddings": True}),
    "llama3.2-3B": preset("llama", 3.21, (3072, 8192, 28, 24, 8), **{**LLAMA, "tie_word_embeddings": True}),
    "llama3.1-8B": preset("llama", 8.03, (4096, 14336, 32, 32, 8), **LLAMA),
    "llama3.1-70B": preset("llama", 70.6, (8192, 28672, 80, 64, 8), **LLAMA),
    "glm4-9B": preset("glm4", 9.4, (4096, 13696, 40, 32, 2), **GLM4),
    "glm4-32B": preset("glm4", 32.6, (6144, 23040, 61, 48, 2), **GLM4),
    "glm4.5-106B-A12B": preset(
        "glm4_moe",
        106.9,
        (4096, 10944, 46, 96, 8),
        **GLM4_MOE,
        n_routed_experts=128,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "glm4.5-355B-A32B": preset("glm4_moe", 352.8, (5120, 12288, 92, 96, 8), **GLM4_355B),
    "glm4.6-355B-A32B": preset("glm4_moe", 352.8, (5120, 12288, 92, 96, 8), **LONG_GLM4_355B),
    "glm4.7-355B-A32B": preset("glm4_moe", 352.8, (5120, 12288, 92, 96, 8), **LONG_GLM4_355B),
    "glm4.7-30B-A3B": preset(
        "glm4_moe_lite",
        29.9,
        (2048, 10240, 47, 20, 20),
        vocab_size=154880,
        max_position_embeddings=202752,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_shared_experts=1,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
    ),
    "glm5-744B-A40B": preset(
        "glm_moe_dsa",
        743.9,
        (6144, 12288, 78, 64, 64),
        **{**LATENT, "rms_norm_eps": 1e-5, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}
        | {"first_k_dense_replace": 3},
        vocab_size=154880,
        max_position_embeddings=202752,
        rope_theta=1e6,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=32,
    ),
    "deepseek-v3": preset("deepseek_v3", 671.0, (7168, 18432, 61, 128, 128), **DEEPSEEK_V3),
    "deepseek-v3.2": preset(
        "deepseek_v32",
        671.9,
        (7168, 18432, 61, 128, 128),
        **DEEPSEEK_V3,
        index_topk=2048,
        index_head_dim=128,
        index_n_heads=64,
    ),
    "kimi-k2": preset(
        "deepseek_v3",
        1026.0,
        (7168, 18432, 61, 64, 64),
        **LATENT,
        vocab_size=163840,
        max_position_embeddings=131072,
        rope_theta=5e4,
        n_routed_experts=384,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.827,
    ),
    "moonlight-16B-A3B": preset(
        "deepseek_v3",
        15.96,
        (2048, 11264, 27, 16, 16),
        **{**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "num_experts_per_tok": 6},
        vocab_size=163840,
        max_position_embeddings=8192,
        rope_theta=5e4,
        n_routed_experts=64,
        moe_intermediate_size=1408,
        routed_scaling_factor=2.446,
    ),
    "mimo-7B": preset(
        "qwen2",
        7.61,
        (4096, 11008, 36, 32, 8),
        vocab_size=151680,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=6.4e5,
    ),
}


def find_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(unknown_name("slime models", name, "preset", sorted(PRESETS)))
    return PRESETS[name]
