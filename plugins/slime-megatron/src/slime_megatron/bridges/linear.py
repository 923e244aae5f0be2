"""Gated delta nets between layers of gated attention: Qwen3-Next, with experts; Qwen3.5, dense and with experts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from slime_core.errors import ModelError
from slime_megatron.bridges.bridge import Architecture, Bridge, Moe
from slime_megatron.bridges.experts import softmax_experts
from slime_megatron.bridges.weight import ByHead, GatedQkv, GateUp, Plain, Slot, Weight


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Bridge):
    """What Qwen3-Next and Qwen3.5 share."""

    ignored = (*Bridge.ignored, r"^mtp\.")
    most_predictions = 1
    layer_kinds = frozenset({"full_attention", "linear_attention"})

    def linear_options(self) -> dict[str, Any]:
        config = self.config
        return {
            **self.common_options(),
            "qk_layernorm": True,
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "linear_attention_freq": [int(kind == "linear_attention") for kind in config.layer_types],
            "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
            "linear_key_head_dim": config.linear_key_head_dim,
            "linear_value_head_dim": config.linear_value_head_dim,
            "linear_num_key_heads": config.linear_num_key_heads,
            "linear_num_value_heads": config.linear_num_value_heads,
        }

    def expert_options(self, moe: Moe) -> dict[str, Any]:
        return {
            **moe.all_options(self.config.num_experts),
            "moe_shared_expert_intermediate_size": self.config.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }

    def layer_weights(self) -> Mapping[str, Weight]:
        return {**self.norms(), **self.attention(), **self.delta_net(), **self.mlp()}

    @abstractmethod
    def mlp(self) -> dict[str, Weight]: ...

    @abstractmethod
    def in_proj(self) -> dict[str, tuple[int, ...]]:
        """Sections (see `ByHead`) of the folder's tensors that give queries, keys, values, gates, strengths and decays."""

    def moe(self) -> dict[str, Weight]:
        """The router and the shared expert."""
        shared = "mlp.shared_expert"
        return {
            "mlp.router.weight": Plain(names=("mlp.gate.weight",)),
            "mlp.shared_experts.linear_fc1.weight": GateUp(
                names=(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
            ),
            "mlp.shared_experts.linear_fc2.weight": Plain(names=(f"{shared}.down_proj.weight",)),
            "mlp.shared_experts.gate_weight": Plain(names=("mlp.shared_expert_gate.weight",)),
        }

    def prediction_weights(self) -> Mapping[str, Weight]:
        return {
            "enorm.weight": Plain(names=("pre_fc_norm_embedding.weight",)),
            "hnorm.weight": Plain(names=("pre_fc_norm_hidden.weight",)),
            "eh_proj.weight": Plain(names=("fc.weight",)),
            "final_layernorm.weight": Plain(names=("norm.weight",)),
        }

    def prediction_prefixes(self, number: int) -> tuple[str, str]:
        return "mtp.", f"mtp.layers.{number}."

    def qkv(self, kind: str) -> GatedQkv:
        plain = super().qkv(kind)
        return GatedQkv(
            names=plain.names,
            groups=plain.groups,
            queries_per_group=plain.queries_per_group,
            head_dim=plain.head_dim,
        )

    @property
    def keys(self) -> int:
        """Features of a key."""
        return int(self.config.linear_key_head_dim)

    @property
    def repeats(self) -> int:
        """Heads of values of each head of keys."""
        return int(self.config.linear_num_value_heads // self.config.linear_num_key_heads)

    @property
    def values(self) -> int:
        """Features of the values of each head of keys."""
        return int(self.repeats * self.config.linear_value_head_dim)

    def delta_net(self) -> dict[str, Weight]:
        def by_head(sections: Mapping[str, tuple[int, ...]]) -> ByHead:
            return ByHead(
                names=tuple(f"linear_attn.{name}.weight" for name in sections),
                heads=self.config.linear_num_key_heads,
                sections=tuple(sections.values()),
            )

        return {
            "self_attention.in_proj.weight": by_head(self.in_proj()),
            "self_attention.conv_weight": by_head({"conv1d": (self.keys, self.keys, self.values)}),
            "self_attention.dt_bias": Plain(names=("linear_attn.dt_bias",)),
            "self_attention.A_log": Plain(names=("linear_attn.A_log",)),
            "self_attention.norm.weight": Plain(names=("linear_attn.norm.weight",)),
            "self_attention.out_proj.weight": Plain(names=("linear_attn.out_proj.weight",)),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(LinearAttention):
    def architecture(self) -> Architecture:
        moe = softmax_experts(self.config, "qwen3_next")
        return self.common_architecture({**self.linear_options(), **self.expert_options(moe)})

    def mlp(self) -> dict[str, Weight]:
        return self.moe()

    def in_proj(self) -> dict[str, tuple[int, ...]]:
        # They already hold a head's rows together.
        return {"in_proj_qkvz": (2 * self.keys + 2 * self.values,), "in_proj_ba": (2 * self.repeats,)}


@dataclass(frozen=True, kw_only=True)
class Qwen35(LinearAttention):
    """Qwen3.5, whose released folders have a vision tower beside the decoder: it is not trained."""

    towers = ("model.visual.",)
    predictions_key = "mtp_num_hidden_layers"

    def architecture(self) -> Architecture:
        return self.common_architecture(self.checked_options())

    def checked_options(self) -> dict[str, Any]:
        config = self.config
        if config.attention_bias or not getattr(config, "attn_output_gate", True):
            raise ModelError(
                "the model's config.json has attention_bias = true or attn_output_gate = false: not computed for qwen3_5."
            )
        return self.linear_options()

    def mlp(self) -> dict[str, Weight]:
        return self.dense_mlp("mlp")

    def in_proj(self) -> dict[str, tuple[int, ...]]:
        return {
            "in_proj_qkv": (self.keys, self.keys, self.values),
            "in_proj_z": (self.values,),
            "in_proj_b": (self.repeats,),
            "in_proj_a": (self.repeats,),
        }

    @property
    def prefix(self) -> str:
        # transformers saves a decoder that was loaded from a released folder under the names of that folder, and one that
        # was made alone without the middle part.
        nested = "model.language_model."
        return nested if any(name.startswith(nested) for name in self.tensors) else "model."


@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts. Released folders have all experts of a layer in one tensor, but those of multi-token prediction one
    by one; in folders of transformers all are one by one."""

    stacked_experts: ClassVar[Mapping[str, Weight]] = {
        "linear_fc1.weight": GateUp(names=("gate_up_proj",)),
        "linear_fc2.weight": Plain(names=("down_proj",)),
    }

    def architecture(self) -> Architecture:
        # transformers normalizes the weights of the chosen experts, whatever the config has.
        moe = Moe(config=self.config, options={"moe_router_pre_softmax": False})
        return self.common_architecture({**self.checked_options(), **self.expert_options(moe)})

    def mlp(self) -> dict[str, Weight]:
        return self.moe()

    def experts_at(self, layer: str, number: int) -> Mapping[str, Weight]:
        if f"{layer}{self.expert_prefix}gate_up_proj" not in self.tensors:
            return super().experts_at(layer, number)
        slot = Slot(index=number, count=self.config.num_experts)
        return {name: replace(weight, slot=slot) for name, weight in self.stacked_experts.items()}
