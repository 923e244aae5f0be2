"""Dense decoders: Llama 3, Qwen2.5, MiMo, Qwen3, GLM-4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slime_core.errors import ModelError
from slime_megatron.bridges.bridge import Architecture, Bridge
from slime_megatron.bridges.weight import GateUp, Plain, Swapped, Weight


@dataclass(frozen=True, kw_only=True)
class Llama(Bridge):
    def architecture(self) -> Architecture:
        if self.config.attention_bias or self.config.mlp_bias:
            raise ModelError("the model's config.json sets biases in attention or MLP: not computed for llama.")
        return self.common_architecture(self.common_options())


@dataclass(frozen=True, kw_only=True)
class Qwen2(Bridge):
    def architecture(self) -> Architecture:
        return self.common_architecture({**self.common_options(), "add_qkv_bias": True})


@dataclass(frozen=True, kw_only=True)
class Mimo(Qwen2):
    """MiMo-7B: Qwen2's layout."""

    config_type = "qwen2"
    ignored = (*Bridge.ignored, r"^model\.mtp_layers\.")

    def architecture(self) -> Architecture:
        if not getattr(self.config, "attention_bias", True):
            raise ModelError(
                "attention_bias = false in the model's config.json: backend megatron does not compute it for mimo."
            )
        return super().architecture()

    def prediction_weights(self) -> Mapping[str, Weight]:
        return {
            "enorm.weight": Plain(names=("token_layernorm.weight",)),
            "hnorm.weight": Plain(names=("hidden_layernorm.weight",)),
            # In the input of its projection the hidden state comes before the embedding.
            "eh_proj.weight": Swapped(names=("input_proj.weight",)),
            "final_layernorm.weight": Plain(names=("final_layernorm.weight",)),
        }

    def prediction_prefixes(self, number: int) -> tuple[str, str]:
        prefix = f"model.mtp_layers.{number}."
        return prefix, prefix


@dataclass(frozen=True, kw_only=True)
class Qwen3(Bridge):
    def architecture(self) -> Architecture:
        if self.config.attention_bias:
            raise ModelError(
                "attention_bias = true in the model's config.json: backend megatron does not compute it for qwen3."
            )
        return self.common_architecture({**self.common_options(), "qk_layernorm": True})


@dataclass(frozen=True, kw_only=True)
class Glm4(Bridge):
    """GLM-4-0414 and Z1: norms before and after attention and MLP, interleaved partial rotary, one gate-up tensor."""

    def architecture(self) -> Architecture:
        options = {
            **self.common_options(),
            "add_qkv_bias": bool(self.config.attention_bias),
            "rotary_interleaved": True,
        }
        return self.common_architecture(options, sandwich_norms=True)

    def norms(self) -> dict[str, Weight]:
        return {
            **super().norms(),
            "self_attention.linear_proj.post_norm.weight": Plain(names=("post_self_attn_layernorm.weight",)),
            "mlp.linear_fc2.post_norm.weight": Plain(names=("post_mlp_layernorm.weight",)),
        }

    def dense_mlp(self, theirs: str, ours: str = "mlp") -> dict[str, Weight]:
        return {
            **super().dense_mlp(theirs, ours),
            f"{ours}.linear_fc1.weight": GateUp(names=(f"{theirs}.gate_up_proj.weight",)),
        }
