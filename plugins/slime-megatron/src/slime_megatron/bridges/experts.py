"""Mixtures of experts with grouped-query attention: Qwen3-MoE, GLM-4.5, MiniMax-M2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slime_core.errors import ModelError
from slime_megatron.bridges.bridge import (
    Architecture,
    Bridge,
    Moe,
    deepseek_prediction_weights,
    sigmoid_moe_weights,
    sigmoid_routing,
)
from slime_megatron.bridges.weight import GateUp, Plain, Weight


def softmax_experts(config: Any, family: str) -> Moe:
    """The experts of Qwen3's families. Raises ModelError for values of their configs that this backend does not compute."""
    if config.attention_bias or config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ModelError(
            "the model's config.json has attention_bias, mlp_only_layers or decoder_sparse_step: not computed for "
            f"{family}."
        )
    # Softmax over the chosen experts equals softmax over all of them, normalized over the chosen.
    return Moe(config=config, options={"moe_router_pre_softmax": not config.norm_topk_prob})


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Bridge):
    def architecture(self) -> Architecture:
        moe = softmax_experts(self.config, "qwen3_moe")
        options = {**self.common_options(), "qk_layernorm": True, **moe.all_options(self.config.num_experts)}
        return self.common_architecture(options)

    def layer_weights(self) -> Mapping[str, Weight]:
        return {**self.norms(), **self.attention(), "mlp.router.weight": Plain(names=("mlp.gate.weight",))}


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Bridge):
    """GLM-4.5, 4.6 and 4.7. Tensors behind the last layer that are not loaded are saved unchanged."""

    ignored = (*Bridge.ignored, r"^model\.layers\.{layers_behind}\.")

    def architecture(self) -> Architecture:
        config = self.config
        moe = Moe(
            config=config,
            first_dense=config.first_k_dense_replace,
            options=sigmoid_routing(config, config.n_routed_experts),
        )
        options = {
            **self.common_options(),
            "add_qkv_bias": bool(config.attention_bias),
            "qk_layernorm": bool(config.use_qk_norm),
            **moe.all_options(config.n_routed_experts),
        }
        return self.common_architecture(options)

    def layer_weights(self) -> Mapping[str, Weight]:
        return {**super().layer_weights(), **sigmoid_moe_weights()}

    def prediction_weights(self) -> Mapping[str, Weight]:
        return deepseek_prediction_weights()


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(Bridge):
    """MiniMax-M2, M2.1, M2.5: queries and keys are normed over all heads; routing is DeepSeek-V3's without groups."""

    ignored = (*Bridge.ignored, r"^model\.layers\.{layers_behind}\.")
    predictions_key = "num_mtp_modules"
    expert_prefix = "block_sparse_moe.experts."
    computed: ClassVar[Mapping[str, Any]] = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "shared_intermediate_size": 0,
    }
    """Values of keys that transformers' config does not have: it computes these."""

    def architecture(self) -> Architecture:
        config = self.config
        given = {key: getattr(config, key, None) for key in self.computed}
        wrong = [f"{key} = {value}" for key, value in given.items() if value not in (None, self.computed[key])]
        if set(getattr(config, "attn_type_list", None) or [1]) != {1}:
            wrong.append(f"attn_type_list = {config.attn_type_list}")
        if wrong:
            raise ModelError(f"{', '.join(wrong)} in the model's config.json: not computed for minimax_m2.")
        moe = Moe(
            config=config,
            width=config.intermediate_size,
            options={"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        )
        options = {**self.common_options(), "qk_layernorm": True, **moe.all_options(config.num_local_experts)}
        return self.common_architecture(options, joint_qk_norm=True)

    def layer_weights(self) -> Mapping[str, Weight]:
        return {
            **self.norms(),
            **self.attention(),
            "mlp.router.weight": Plain(names=("block_sparse_moe.gate.weight",)),
            "mlp.router.expert_bias": Plain(names=("block_sparse_moe.e_score_correction_bias",)),
        }

    def expert_weights(self) -> Mapping[str, Weight]:
        return {
            "linear_fc1.weight": GateUp(names=("w1.weight", "w3.weight")),
            "linear_fc2.weight": Plain(names=("w2.weight",)),
        }
