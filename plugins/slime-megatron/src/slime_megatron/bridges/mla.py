"""Multi-head latent attention: DeepSeek-V3, V3.1, R1, and models with the same layout (Kimi K2, Moonlight, GLM-4.7-Flash); with
chosen keys DeepSeek-V3.2 and GLM-5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_core.errors import ModelError
from slime_megatron.bridges.bridge import (
    Architecture,
    Bridge,
    Moe,
    choosers_of,
    deepseek_prediction_weights,
    sigmoid_moe_weights,
    sigmoid_routing,
)
from slime_megatron.bridges.weight import Plain, Weight


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Bridge):
    """Tensors behind the last layer that are not loaded are saved unchanged."""

    config_type: ClassVar[str | None] = "deepseek_v3"
    ignored = (*Bridge.ignored, r"^model\.layers\.{layers_behind}\.")

    def architecture(self) -> Architecture:
        config = self.config
        if config.attention_bias:
            raise ModelError(f"attention_bias = true in the model's config.json: not computed for {config.model_type}.")
        if not getattr(config, "rope_interleave", True):
            raise ModelError(
                f"rope_interleave = false in the model's config.json: not computed for {config.model_type}."
            )
        moe = Moe(
            config=config,
            first_dense=self.first_dense,
            options=sigmoid_routing(config, config.n_routed_experts),
        )
        options: dict[str, Any] = {
            **self.common_options(),
            "num_query_groups": None,
            "kv_channels": None,
            "qk_layernorm": True,
            "multi_latent_attention": True,
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_head_dim": config.qk_nope_head_dim,
            "qk_pos_emb_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "rope_type": "rope",
            # Used for the softmax's scale only; positions are embedded by slime's module.
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
            **moe.all_options(config.n_routed_experts),
            **self.indexer_options(),
        }
        parameters = config.rope_parameters
        if parameters.get("rope_type", "default") == "yarn":
            options |= {
                "rope_type": "yarn",
                "rotary_scaling_factor": parameters["factor"],
                "mscale_all_dim": parameters.get("mscale_all_dim", 0.0) or 0.0,
            }
        return self.common_architecture(options, mla=True, **self.choice())

    @property
    def first_dense(self) -> int:
        """Layers before the first one with experts."""
        return int(self.config.first_k_dense_replace)

    def indexer_options(self) -> dict[str, Any]:
        return {}

    def choice(self) -> dict[str, Any]:
        """Fields of Architecture for the layers that choose keys (DSA)."""
        return {}

    def layer_weights(self) -> Mapping[str, Weight]:
        return {**super().layer_weights(), **sigmoid_moe_weights()}

    def prediction_weights(self) -> Mapping[str, Weight]:
        return deepseek_prediction_weights()

    def attention(self) -> dict[str, Weight]:
        theirs = {
            "linear_q_proj": "q_proj",
            "linear_q_down_proj": "q_a_proj",
            "q_layernorm": "q_a_layernorm",
            "linear_q_up_proj": "q_b_proj",
            "linear_kv_down_proj": "kv_a_proj_with_mqa",
            "kv_layernorm": "kv_a_layernorm",
            "linear_kv_up_proj": "kv_b_proj",
            "linear_proj": "o_proj",
        }
        return {
            f"self_attention.{ours}.weight": Plain(names=(f"self_attn.{name}.weight",)) for ours, name in theirs.items()
        }

    @property
    def rotary_head_dim(self) -> int:
        # transformers 5 calls the rotated part the head.
        return int(self.config.qk_rope_head_dim)


@dataclass(frozen=True, kw_only=True)
class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: DeepSeek-V3's layout, whose config lists the kind of each layer's MLP."""

    config_type = None

    @property
    def first_dense(self) -> int:
        kinds = list(self.config.mlp_layer_types)
        count = kinds.count("dense")
        if kinds != ["dense"] * count + ["sparse"] * (len(kinds) - count):
            raise ModelError(
                f"mlp_layer_types = {kinds} in the model's config.json: all dense layers have to come first."
            )
        return count


@dataclass(frozen=True, kw_only=True)
class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2."""

    config_type = None
    layer_kinds = frozenset({"deepseek_sparse_attention"})
    interleaved_indexer: ClassVar[bool] = False

    def indexer_options(self) -> dict[str, Any]:
        config = self.config
        layers, dense = config.num_hidden_layers, config.first_k_dense_replace
        if config.mlp_layer_types != ["dense"] * dense + ["sparse"] * (layers - dense):
            raise ModelError(
                "mlp_layer_types in the model's config.json: they differ from first_k_dense_replace, which is not computed."
            )
        return {
            "dsa_indexer_n_heads": config.index_n_heads,
            "dsa_indexer_head_dim": config.index_head_dim,
            "dsa_indexer_topk": config.index_topk,
        }

    def choice(self) -> dict[str, Any]:
        kinds = getattr(self.config, "indexer_types", None) or ["full"] * self.config.num_hidden_layers
        interleaved = getattr(self.config, "indexer_rope_interleave", None)
        interleaved = self.interleaved_indexer if interleaved is None else bool(interleaved)
        return {"choosers": choosers_of(kinds), "interleaved_indexer": interleaved}

    def attention(self) -> dict[str, Weight]:
        names = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
        theirs = "self_attn.indexer"
        return {
            **super().attention(),
            **{f"self_attention.core_attention.indexer.{name}": Plain(names=(f"{theirs}.{name}",)) for name in names},
        }


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsa(DeepseekV32):
    """GLM-5. Its indexer rotates pairs of neighbouring features; transformers 5.12 rotates halves, 5.17 does not."""

    interleaved_indexer = True
